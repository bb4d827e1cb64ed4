"""params.yaml as typed, frozen dataclasses: the only configuration of a run, declared here and nowhere else.

Each field says its effect, its unit and K2's own value ("not public" where the report has none). An unknown key, a missing key, a
wrong type or a value out of bounds raises ConfigError with the key's path. The report is arXiv 2507.20534.
"""

import dataclasses
import difflib
import functools
import math
import operator
import types
import typing
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from k2.errors import ConfigError


def knob(doc: str, *, gt: float | None = None, ge: float | None = None, le: float | None = None, among: tuple = ()) -> Any:
    """A required field with its description and bounds (exclusive `gt`, inclusive `ge` and `le`, or a set of choices)."""
    bounds = {k: v for k, v in {"gt": gt, "ge": ge, "le": le, "among": among}.items() if v not in (None, ())}
    return dataclasses.field(default=MISSING, metadata={"doc": doc, **bounds})


DTYPES = ("bfloat16", "float32")


# -- shared sections ---------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class YarnConfig:
    factor: float = knob("Context extension factor over the model's max_position_embeddings. K2: 32 (4K to 128K).", ge=1)
    beta_fast: float = knob("Rotations above which a frequency is kept. K2: 1.", gt=0)
    beta_slow: float = knob("Rotations below which a frequency is divided by `factor`. K2: 1.", gt=0)
    mscale: float = knob("Attention temperature factor. K2: 1.", ge=0)
    mscale_all_dim: float = knob("The same, applied to the whole head; squared into the softmax scale. K2: 1.", ge=0)


@dataclass(frozen=True)
class ModelConfig:
    """DeepSeek-V3's shape with K2's numbers (report section 2.3, table 2). Names are Hugging Face's."""

    vocab_size: int = knob("Size of the vocabulary, special tokens included. K2: 163840.", gt=0)
    hidden_size: int = knob("Width of the residual stream. K2: 7168.", gt=0)
    num_hidden_layers: int = knob("Layers. K2: 61.", gt=0)
    first_k_dense_replace: int = knob("Leading layers with a dense MLP in place of experts. K2: 1.", ge=0)
    intermediate_size: int = knob("Width of the dense MLP. K2: 18432.", gt=0)
    num_attention_heads: int = knob("Attention heads. K2: 64 (half of DeepSeek-V3's).", gt=0)
    q_lora_rank: int | None = knob("Rank of the query latent, null for a full query projection. K2: 1536.", gt=0)
    kv_lora_rank: int = knob("Rank of the key-value latent, which is what the cache holds. K2: 512.", gt=0)
    qk_nope_head_dim: int = knob("Head size without position. K2: 128.", gt=0)
    qk_rope_head_dim: int = knob("Head size with rotary position, even. K2: 64.", gt=0)
    v_head_dim: int = knob("Value head size. K2: 128.", gt=0)
    n_routed_experts: int = knob("Routed experts of a MoE layer. K2: 384.", gt=0)
    num_experts_per_tok: int = knob("Routed experts that see a token. K2: 8.", gt=0)
    n_shared_experts: int = knob("Shared experts, one MLP of this many times the expert width. K2: 1.", ge=0)
    moe_intermediate_size: int = knob("Width of an expert. K2: 2048.", gt=0)
    routed_scaling_factor: float = knob("Factor on the routed experts' sum. K2: 2.827.", gt=0)
    rope_theta: float = knob("Base of the rotary frequencies. K2: 50000.", gt=0)
    max_position_embeddings: int = knob("Context of pre-training, in tokens. K2: 4096.", gt=0)
    rms_norm_eps: float = knob("Epsilon of RMSNorm. K2: 1e-6.", gt=0)
    initializer_range: float = knob("Standard deviation of initial weights. K2: not public.", gt=0)
    yarn: YarnConfig | None = None  # set by the extend stage, stored in the model's config.json; never in params.yaml

    def __post_init__(self) -> None:
        if MISSING in (self.num_experts_per_tok, self.qk_rope_head_dim, self.first_k_dense_replace):
            return  # omegaconf builds the bare schema
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(f"num_experts_per_tok: {self.num_experts_per_tok} is above n_routed_experts ({self.n_routed_experts})")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim: {self.qk_rope_head_dim} is odd; rotary pairs need an even size")
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ValueError(f"first_k_dense_replace: {self.first_k_dense_replace} is above num_hidden_layers")


@dataclass(frozen=True)
class MuonClipConfig:
    """The optimizer of every training stage (report section 2.1; Moonlight, arXiv 2502.16982, where the report is silent)."""

    momentum: float = knob("Muon momentum, buf = momentum * buf + grad. K2: not public; Moonlight 0.95.", ge=0, le=1)
    nesterov: bool = knob("Feed momentum * buf + grad to Newton-Schulz. K2 prints plain momentum; Moonlight uses Nesterov.")
    ns_steps: int = knob("Newton-Schulz iterations. K2: not public; Moonlight 5.", ge=1)
    rms_scale: float = knob("Update RMS: rms_scale * sqrt(max(n, m)) times the orthogonal update. K2: 0.2.", gt=0)
    weight_decay: float = knob("Decoupled weight decay, on every parameter. K2: 0.1.", ge=0)
    qk_clip_tau: float | None = knob("Max attention logit above which a head is clipped, null for none. K2: 100.", gt=0)
    adam_beta1: float = knob("AdamW beta 1 for embeddings, head, norms. Moonlight 0.9.", ge=0, le=1)
    adam_beta2: float = knob("AdamW beta 2. Moonlight 0.95.", ge=0, le=1)
    adam_eps: float = knob("AdamW epsilon. Moonlight 1e-8.", gt=0)
    max_grad_norm: float | None = knob("Clip of the raw gradient's global norm, null for none. K2: not public.", gt=0)


@dataclass(frozen=True)
class LLMConfig:
    """The language model that rephrases and, when it is an endpoint, judges dialogues."""

    provider: str = knob(
        "`local`: a transformers model in this process; `openai`: an OpenAI-compatible endpoint.", among=("local", "openai")
    )
    model: str = knob("smollm2-135m-instruct (shipped by a PyPI package), a local path, or the endpoint's model name.")
    base_url: str | None = knob("The endpoint's address; its key comes from the environment variable OPENAI_API_KEY.")
    batch_size: int = knob("Prompts generated together (local) or requests in flight (endpoint).", gt=0)
    temperature: float = knob("Sampling temperature.", ge=0)
    top_p: float = knob("Nucleus sampling mass.", gt=0, le=1)


@dataclass(frozen=True)
class GymConfig:
    domains: dict[str, dict[str, Any]] = knob(
        "Domain name to its settings: `dataset` is a reasoning-gym dataset and the rest its arguments."
    )
    max_new_tokens: dict[str, int] = knob(
        "Token budget of an answer by domain (budget control, report section 3.2.3). K2: not public."
    )
    held_out_seed: int = knob("First seed of the evaluation tasks; training tasks never reach it.", gt=0)


# -- stages ------------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class CorpusConfig:
    source: str = knob("`python-docs`, or a file, folder or URL (s3://, hf://, https://) of txt, md, jsonl or parquet.")
    max_bytes: int = knob("Stop reading after this many bytes of text.", gt=0)
    min_characters: int = knob("Shorter documents are dropped.", ge=0)
    near_duplicate_threshold: float = knob(
        "Estimated Jaccard similarity of word 5-grams from which a document is a near-duplicate.", gt=0, le=1
    )
    validation_fraction: float = knob("Share of documents held out of training.", gt=0, le=0.5)
    seed: int = knob("Random seed.", ge=0)


@dataclass(frozen=True)
class RephraseConfig:
    """Report section 2.2 and figure 4."""

    documents: int = knob("Documents to rewrite, the best first. K2: not public.", ge=0)
    rewrites_per_document: int = knob("Rewrites of a document. K2: at most 2.", ge=1)
    styles: list[str] = knob("Styles and perspectives, cycled over the rewrites.")
    excerpt_tokens: int = knob("A document is cut to this many tokens. K2's figure: 4096.", gt=0)
    chunk_tokens: int = knob("Tokens rewritten at a time, with the previous rewrite as context. K2's figure: 256.", gt=0)
    min_similarity: float = knob("Cosine of sentence embeddings below which a rewrite is rejected. K2: not public.", ge=-1, le=1)
    seed: int = knob("Random seed.", ge=0)


@dataclass(frozen=True)
class TokenizerConfig:
    path: str | None = knob("A folder or tokenizer.json to take as it is; null trains a BPE of model.vocab_size.")


@dataclass(frozen=True)
class TokenizeConfig:
    """Domains are the corpus's own (`docs` and `code` of python-docs; the records' `domain`, else `text`, of your files),
    `rewrites` from rephrase, and `recall`, documents made to teach long-range retrieval (k2/data/recall.py).

    The weight of a domain that the corpus lacks goes to the corpus's domains that no phase names, so that your own text needs no
    change here; if there are none, to the other domains in proportion. A note says so.
    """

    phases: dict[str, dict[str, float]] = knob("Mixture weight by domain for pretrain, anneal and extend. K2: not public.")
    max_epochs: float = knob("A domain is repeated at most this often in a phase; the others fill up.", gt=0)
    seed: int = knob("Random seed.", ge=0)


@dataclass(frozen=True)
class OptimConfig:
    """Warmup-stable-decay by tokens: linear to lr, constant, then cosine to final_lr over the last decay_fraction of the tokens."""

    lr: float = knob("Peak learning rate. K2: 2e-4 in pre-training, 2e-5 at the start of annealing.", ge=0)
    final_lr: float = knob("Learning rate at the end. K2: 2e-5 after pre-training, 7e-6 after annealing.", ge=0)
    warmup_tokens: int = knob("Tokens of linear warm-up. K2: 500 steps of 67M tokens.", ge=0)
    decay_fraction: float = knob("Share of the tokens in the final cosine. K2: 5.5 of 15.5.", ge=0, le=1)


@dataclass(frozen=True)
class TrainConfig:
    """What pretrain, anneal, extend and sft share: one loop, so one section each of the same type."""

    tokens: int = knob("Tokens to train on. K2: 15.5T, then 400B (anneal), 60B (32K).", gt=0)
    seq_len: int = knob("Tokens in a sequence. K2: 4096, and 32768 in extension.", gt=1)
    batch_tokens: int = knob("Tokens of a step, a multiple of seq_len. K2: 67,108,864.", gt=0)
    micro_batch_tokens: int = knob("Tokens of one forward and backward; a step accumulates over them.", gt=0)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    bias_update_rate: float = knob("Router selection-bias step. K2: not public; Moonlight 1e-3, 0 in cooldown.", ge=0)
    validation_every: int = knob("Tokens between measurements of bits per byte on the validation split.", gt=0)
    validation_tokens: int = knob("Validation tokens of such a measurement.", gt=0)
    dtype: str = knob("What the forward pass computes in; masters are float32. K2: bfloat16.", among=DTYPES)
    seed: int = knob("Random seed.", ge=0)

    def __post_init__(self) -> None:
        if MISSING in (self.seq_len, self.batch_tokens, self.micro_batch_tokens):
            return
        for name, value, divisor in (
            ("micro_batch_tokens", self.micro_batch_tokens, self.seq_len),
            ("batch_tokens", self.batch_tokens, self.micro_batch_tokens),
        ):
            if value % divisor:
                raise ValueError(f"{name}: {value} is not a multiple of {divisor}; take {max(1, round(value / divisor)) * divisor}")


@dataclass(frozen=True)
class ExtendConfig(TrainConfig):
    yarn: YarnConfig = dataclasses.field(default_factory=YarnConfig)


@dataclass(frozen=True)
class ToolsConfig:
    evolved_tools: int = knob("Tools evolved from category to domain to tool. K2: 20,000+ beside 3,000+ real ones.", ge=0)
    seed: int = knob("Random seed.", ge=0)


@dataclass(frozen=True)
class TrajectoriesConfig:
    dialogues: int = knob("Dialogues to simulate before the judge's filter. K2: tens of thousands kept.", gt=0)
    max_turns: int = knob("Turns after which a dialogue ends unfinished.", gt=0)
    failure_rate: float = knob(
        "Probability that a tool call fails in part or whole. K2: 'controlled stochasticity', not public.", ge=0, le=1
    )
    seed: int = knob("Random seed.", ge=0)


@dataclass(frozen=True)
class SFTConfig(TrainConfig):
    gym_examples_per_domain: int = knob("Worked gym examples of each domain among the dialogues.", ge=0)


@dataclass(frozen=True)
class CurateConfig:
    """Prompts of moderate difficulty, by the SFT model's pass rate (report section 3.2.1)."""

    prompts_per_domain: int = knob("Candidate prompts of each domain.", gt=0)
    samples_per_prompt: int = knob("Samples to estimate the pass rate from.", gt=1)
    min_pass_rate: float = knob("Prompts that pass more rarely are dropped. K2: not public.", ge=0, le=1)
    max_pass_rate: float = knob("Prompts that pass more often are dropped. K2: not public.", ge=0, le=1)
    temperature: float = knob("Sampling temperature.", gt=0)
    seed: int = knob("Random seed.", ge=0)


@dataclass(frozen=True)
class RLConfig:
    """Report section 3.2.3; none of its numbers is public."""

    steps: int = knob("Policy iterations: rollout, one update, weight sync.", gt=0)
    prompts_per_step: int = knob("Prompts of an iteration.", gt=0)
    samples_per_prompt: int = knob("K, the samples of a group.", gt=1)
    tau: float = knob("Regularisation towards the previous policy; the loss is divided by 2 tau.", gt=0)
    ptx_weight: float = knob("Weight of the auxiliary language-model loss on SFT dialogues.", ge=0)
    ptx_batch_tokens: int = knob("Tokens of the auxiliary loss in a step.", ge=0)
    over_budget_penalty: float = knob("Subtracted from the reward of a sample that ran out of its token budget.", ge=0)
    held_out_prompts: int = knob("Held-out prompts of each domain whose mean reward is measured.", gt=0)
    held_out_every: int = knob("Steps between these measurements.", gt=0)
    temperature: float = knob("Sampling temperature at the first step.", gt=0)
    final_temperature: float = knob("Sampling temperature at the last step; linear in between.", gt=0)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    bias_update_rate: float = knob("Router selection-bias step.", ge=0)
    dtype: str = knob("What the forward pass computes in.", among=DTYPES)
    seed: int = knob("Random seed.", ge=0)


@dataclass(frozen=True)
class EvaluateConfig:
    bits_per_byte_tokens: int = knob("Validation tokens of each model's bits per byte.", gt=0)
    needle_lengths: list[int] = knob("Context lengths of the needle test, in tokens.")
    needle_depths: list[float] = knob("Where the needle lies, 0 the beginning, 1 the end.")
    needle_trials: int = knob("Needles for each length and depth.", gt=0)
    prompts_per_domain: int = knob("Held-out gym prompts of each domain.", gt=0)
    samples_per_prompt: int = knob("Samples for pass@1 and pass@k.", gt=0)
    temperature: float = knob("Sampling temperature. K2's recommendation: 0.6.", gt=0)
    seed: int = knob("Random seed.", ge=0)


@dataclass(frozen=True)
class PublishConfig:
    registered_model: str = knob("Name in MLflow's model registry.")
    alias: str = knob("Alias that the new version gets.")


@dataclass(frozen=True)
class ExecutionConfig:
    """Where a run happens. No stage depends on it, so that it never changes what is computed or cached."""

    device: str = knob("`auto`, `cpu`, `cuda` or `cuda:N`.")
    threads: int | None = knob("CPU threads, null for PyTorch's own choice.", gt=0)
    checkpoint_seconds: float = knob("Seconds between resume states of a training stage.", gt=0)
    experiment: str = knob("MLflow experiment.")
    tracking_uri: str | None = knob(
        "MLflow address; MLFLOW_TRACKING_URI goes before it. null: sqlite:///mlflow.db beside params.yaml."
    )


@dataclass(frozen=True)
class Params:
    """The whole of params.yaml."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    muonclip: MuonClipConfig = dataclasses.field(default_factory=MuonClipConfig)
    llm: LLMConfig = dataclasses.field(default_factory=LLMConfig)
    gym: GymConfig = dataclasses.field(default_factory=GymConfig)
    corpus: CorpusConfig = dataclasses.field(default_factory=CorpusConfig)
    rephrase: RephraseConfig = dataclasses.field(default_factory=RephraseConfig)
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    tokenize: TokenizeConfig = dataclasses.field(default_factory=TokenizeConfig)
    pretrain: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    anneal: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    extend: ExtendConfig = dataclasses.field(default_factory=ExtendConfig)
    tools: ToolsConfig = dataclasses.field(default_factory=ToolsConfig)
    trajectories: TrajectoriesConfig = dataclasses.field(default_factory=TrajectoriesConfig)
    sft: SFTConfig = dataclasses.field(default_factory=SFTConfig)
    curate: CurateConfig = dataclasses.field(default_factory=CurateConfig)
    rl: RLConfig = dataclasses.field(default_factory=RLConfig)
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)
    publish: PublishConfig = dataclasses.field(default_factory=PublishConfig)
    execution: ExecutionConfig = dataclasses.field(default_factory=ExecutionConfig)


# -- loading -----------------------------------------------------------------------------------------------------------------------
def load_params(path: Path | str) -> Params:
    """Read and check the whole of a params.yaml. Raises ConfigError with the key's path, what is wrong, and the mend."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; run from the project's root or restore the file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable: {error}") from None
    return parse_params(text, str(path))


def parse_params(text: str, origin: str) -> Params:
    """The same for text that is not in a file yet; `origin` names it in errors."""
    try:
        raw = OmegaConf.create(text)
    except Exception as error:  # the parsers' own errors have no common base
        raise ConfigError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, DictConfig) or isinstance(text, str) and raw == {text.strip(): None}:
        raise ConfigError(f"{origin}: expected sections with keys at the top level")
    try:
        return parse(Params, raw, "")
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from None


def parse(cls: type, node: Any, at: str) -> Any:
    """A dataclass from an OmegaConf mapping; ValueError names the key's path below `at`."""
    if not isinstance(node, DictConfig):
        raise ValueError(f"{at}: expected a section with keys, got {node!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in node:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"known keys: {', '.join(fields)}"
            raise ValueError(f"{_join(at, key)}: unknown key; {hint}")
        if OmegaConf.is_interpolation(node, key):
            raise ValueError(f"{_join(at, key)}: interpolation would hide a dependency from dvc.yaml; write the value itself")
    values = {}
    for name, field in fields.items():
        if name in node and isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            values[name] = parse(field.type, node._get_node(name), _join(at, name))
        elif name not in node and (field.default is NO_DEFAULT or field.default == MISSING):
            raise ValueError(f"{_join(at, name)}: missing; {field.metadata.get('doc', 'add the section')}")
    leaves = {name: node[name] for name in fields if name in node and name not in values}
    for name, value in _typed(cls, leaves, at).items():
        _check_bounds(value, fields[name], _join(at, name))
        values[name] = value
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(_join(at, str(error))) from None


def _typed(cls: type, leaves: dict[str, Any], at: str) -> dict[str, Any]:
    """OmegaConf converts and checks the leaves against the types of `cls`: all at once, or one by one to find the culprit."""
    kinds = {f.name: f.type for f in dataclasses.fields(cls)}
    try:
        typed = OmegaConf.merge(_schema(cls), leaves)
        values = {name: _plain(typed._get_node(name)) for name in leaves}  # type: ignore[union-attr]
        if all(_fits(values[name], kinds[name]) and _fits(leaves[name], kinds[name], loose=True) for name in leaves):
            return values
    except OmegaConfBaseException:
        pass
    for field in dataclasses.fields(cls):
        if field.name in leaves:
            value = leaves[field.name]
            try:
                typed = _plain(OmegaConf.merge(_schema(cls), {field.name: value})._get_node(field.name))  # type: ignore[union-attr]
                fits = _fits(typed, field.type) and _fits(value, field.type, loose=True)
            except OmegaConfBaseException:
                fits = False
            if not fits:
                shown, doc = getattr(field.type, "__name__", str(field.type)), field.metadata.get("doc", "")
                shown = str(field.type) if typing.get_args(field.type) else shown
                raise ValueError(f"{_join(at, field.name)}: expected {shown}, got {str(_plain(value)):.60}; {doc}")
    raise AssertionError("a merge failed whose parts succeed")


def _fits(value: Any, kind: Any, loose: bool = False) -> bool:
    """What OmegaConf lets through: a number for a bool, a mapping for a string. `loose` looks at raw values, for bool alone."""
    if loose:
        return kind is not bool or isinstance(value, bool)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(v, typing.get_args(kind)[0]) for v in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(v, typing.get_args(kind)[1]) for v in value.values())
    return kind is Any or isinstance(value, kind) or (kind is float and isinstance(value, int))


@functools.cache
def _schema(cls: type) -> Any:
    return OmegaConf.structured(cls)


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node) if isinstance(node, (DictConfig, ListConfig)) else getattr(node, "_value", lambda: node)()


def _check_bounds(value: Any, field: dataclasses.Field, where: str) -> None:
    bounds = field.metadata
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ValueError(f"{where}: {value} is not a finite number; {bounds['doc']}")
        for test, name, ok in (("above", "gt", operator.gt), ("at least", "ge", operator.ge), ("at most", "le", operator.le)):
            if name in bounds and not ok(value, bounds[name]):
                raise ValueError(f"{where}: {value} must be {test} {bounds[name]}; {bounds['doc']}")
    if "among" in bounds and value not in bounds["among"]:
        raise ValueError(f"{where}: {value!r} is not one of {', '.join(bounds['among'])}")


def _join(at: str, key: Any) -> str:
    return f"{at}.{key}" if at else str(key)

import pytest
import torch
import torch.nn.functional as F

from k2.model.norm import RMSNorm


@pytest.mark.parametrize("shape", [(7, 16), (2, 3, 16)])
def test_rms_norm_is_torchs(shape):
    """Value and both gradients, in float64; gradcheck as well."""
    norm = RMSNorm(16, 1e-6).double()
    g = torch.Generator().manual_seed(0)
    norm.weight.data.normal_(1, 0.3, generator=g)
    x = torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)
    out, expected = norm(x), F.rms_norm(x, (16,), norm.weight, 1e-6)
    torch.testing.assert_close(out, expected)
    weight = torch.randn(shape, generator=g, dtype=torch.float64)
    found = torch.autograd.grad((out * weight).sum(), [x, norm.weight])
    wanted = torch.autograd.grad((expected * weight).sum(), [x, norm.weight])
    torch.testing.assert_close(found, wanted)


def test_rms_norm_in_bfloat16_is_within_its_rounding():
    """Against float64 from the same bfloat16 input: one rounding, half a unit in the last of 8 bits."""
    norm = RMSNorm(256, 1e-6).bfloat16()
    x = (torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    exact = F.rms_norm(x.double(), (256,), eps=1e-6)
    assert ((norm(x).double() - exact).abs() <= 1.05 * 2**-8 * exact.abs()).all()

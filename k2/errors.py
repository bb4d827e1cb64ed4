"""Errors that a user can mend: one line that names the key or file, what is wrong, and what to do."""


class K2Error(Exception):
    """A stage cannot go on. The message is one line for the user; it is shown without a traceback."""

    exit_code = 1


class ConfigError(K2Error):
    """params.yaml or dvc.yaml is wrong: never retried, exit code 2."""

    exit_code = 2

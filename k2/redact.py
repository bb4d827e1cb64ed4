"""Secrets stay out of logs, params and tags: one place that knows what a secret looks like."""

import os
import re

NAMES = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
IN_QUERY = re.compile(r"(?i)([?&][^=&\s]*(?:key|token|secret|signature|password|credential|sig)[^=&\s]*=)[^&\s'\"]+")
SHORTEST = 8  # shorter values of environment variables are too likely to be ordinary words


def redact(text: str) -> str:
    """`text` with the credentials of URLs, and the values of environment variables that are named like secrets, as `***`."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and NAMES.search(name) and value in text and not os.path.exists(value):
            text = text.replace(value, "***")
    return IN_QUERY.sub(r"\1***", IN_URL.sub("***", text))

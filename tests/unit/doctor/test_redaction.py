"""Each rule of the redaction, by its example."""

from __future__ import annotations

import re

import pytest

from yolofleet.support.redaction import RULES, Redaction, Rule


@pytest.mark.parametrize("rule", RULES, ids=[rule.example for rule in RULES])
def test_a_rule_removes_the_secret_of_its_example(rule: Rule) -> None:
    line, secrets = re.sub("[«»]", "", rule.example), re.findall("«(.*?)»", rule.example)
    pattern, replacement = rule.compiled
    alone = pattern.sub(replacement, line)
    for clean in (alone, Redaction({})(line), Redaction({})(f"x\n  {line} y\nz\n")):
        assert secrets and not any(secret in clean for secret in secrets), clean
    assert "[removed]" in alone or "[user]" in alone


@pytest.mark.parametrize(
    "text",
    [
        *("the password was correct", "the passphrase is correct.", "the credentials are wrong"),
        *("HF_TOKEN is not set", "set WANDB_API_KEY to log in", "NCCL_KEY and others", "MY_TOKEN."),
        *(
            "epoch 12:30:05",
            "0123456789:x",
            "SKU0123",
            "docker login ghcr.io",
            "ntfy is a service",
            "FORMAT_PATH x",
        ),
    ],
)
def test_text_that_only_looks_like_a_secret_stays(text: str) -> None:
    assert Redaction({})(text) == text

"""What is taken out of a text, and what is not."""

import pytest

from services.local.redaction import HIDDEN, Redaction, is_secret

REDACTION = Redaction({"HF_TOKEN": "correct-horse", "HOME": "/home/alice", "SHORT_PASSWORD": "abc"})


@pytest.mark.parametrize(
    "text, gone",
    [
        ("HF_TOKEN=wonderland", "wonderland"),
        ("export AWS_SECRET_ACCESS_KEY='wonderland'", "wonderland"),
        ('{"password": "wonderland", "user": "alice"}', "wonderland"),
        ("python --api-key wonderland --port 1", "wonderland"),
        ("python --hub-token=wonderland", "wonderland"),
        ("args: ['--api-key', 'wonderland']", "wonderland"),
        ("Authorization: Bearer wonderland", "wonderland"),
        ("curl -H 'authorization: bearer wonderland'", "wonderland"),
        ("https://alice:wonderland@registry.example.com/x", "wonderland"),
        ("downloading with hf_abcdefghijklmnop", "hf_abcdefghijklmnop"),
        ("key sk-proj_abcdefghijklmnop", "abcdefghijklmnop"),
        ("a.eyJhbGciOiJIUzI1NiJ9", "none"),
        ("token eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "c2lnbmF0dXJl"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIwonderland\n-----END RSA PRIVATE KEY-----\nafter", "wonderland"),
        ("-----BEGIN PRIVATE KEY-----\nMIIwonderland", "wonderland"),
        ("somebody wrote correct-horse in a message", "correct-horse"),
    ],
)
def test_secrets_are_gone(text: str, gone: str) -> None:
    assert gone not in REDACTION.text(text)


@pytest.mark.parametrize(
    "text",
    [
        "LOCKSTEP_SCHEDULER_MAX_STEP_TOKENS=512",
        'lockstep_time_to_first_token_seconds_bucket{le="0.5"} 3',
        "120 tokens: 3.4 s",
        "NCCL_SOCKET_IFNAME=eth0",
        "http://127.0.0.1:8000/v1",
        "keys.json was read anew: 2 keys",
        "at /home/alice, abc",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert REDACTION.text(text) == text


def test_objects_are_looked_through() -> None:
    container = {
        "env": [
            {"name": "HF_TOKEN", "value": "x"},
            {"name": "A", "value": "b"},
            {"name": "API_KEY", "valueFrom": {"secretKeyRef": {"key": "k"}}},
        ],
        "args": ["--hub-token=wonderland"],
        "settings": {"password": "y", "max_tokens": 3, "token": None},
    }
    assert REDACTION.json(container) == {
        "env": [
            {"name": "HF_TOKEN", "value": HIDDEN},
            {"name": "A", "value": "b"},
            {"name": "API_KEY", "valueFrom": {"secretKeyRef": {"key": "k"}}},
        ],
        "args": [f"--hub-token={HIDDEN}"],
        "settings": {"password": HIDDEN, "max_tokens": 3, "token": None},
    }


def test_names_that_open_something() -> None:
    assert all(map(is_secret, ("token", "HF_TOKEN", "LOCKSTEP_GATEWAY_API_KEYS", "db-password", "aws_secret_access_key")))
    assert not any(map(is_secret, ("tokens", "max_tokens", "secretKeyRef", "keys", "TOKENIZERS_PARALLELISM", "keyboard")))

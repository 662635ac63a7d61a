"""What is secret is in nothing that is kept, printed or shown to others of a host; what only sounds so stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pytest_llmperf.launch.site import SlurmOptions
from pytest_llmperf.launch.slurm.cluster import passed_on
from pytest_llmperf.records.failure import Failure
from pytest_llmperf.support import redaction
from pytest_llmperf.support.files import shipped
from pytest_llmperf.support.redaction import SET, is_secret, without_secrets
from tests.fakes import ENVIRONMENT
from tests.golden import Golden

SECRET = [
    ("TORCH_NCCL_XSECRET", "x"),
    ("NCCL_PASS", "1"),
    ("TORCH_API_TOKEN2", "12345"),
    ("PGPASSWORD", "x"),
    ("DB_PWD", "x"),
    ("apiKey", "1"),
    ("NCCL_CREDENTIALS", "u"),
    ("NCCL_NET_URL", "https://user:pass@host"),
    ("NCCL_NET_URL", "https://user:p@ss@host/x"),
    ("GLOO_X", "-x proxy=http://u:p@h:80 -y"),
    ("OMP_X", "redis://:pw@h"),
    ("CUDA_X", "https://name@github.com/x"),
    ("CUDA_X", "http://h/x?a=1&access_token=abc"),
    ("CUDA_X", "run --token abc"),
    ("CUDA_X", "env HF_TOKEN=abc python"),
    ("CUDA_X", "hf_abcdefghijklmnopqrst"),
    ("CUDA_X", '{"token": "hunter2secret"}'),
    ("CUDA_X", '{"api_key" : "hunter2"}'),
    ("CUDA_X", "{'awsSecretKey': 'hunter2secret'}"),
    ("CUDA_X", "-H 'authorization: bearer hunter2secret'"),
    ("CUDA_X", '-H "PRIVATE-TOKEN: hunter2"'),
    ("CUDA_X", "hub.token=hunter2secret"),
    ("CUDA_X", "trainer.hub_token=hunter2"),
    ("CUDA_X", "https://hooks.slack.com/services/T00/B00/hunter2"),
    ("CUDA_X", "AIzaSyD-0123456789abcdefghijklmnopqrst"),
    ("CUDA_X", "-----BEGIN RSA PRIVATE KEY-----\nMIIE"),
]
OTHERS = [
    ("TOKENIZERS_PARALLELISM", "false"),
    ("KEYBOARD", "us"),
    ("NCCL_PASSTHROUGH", "1"),
    ("NCCL_BYPASS", "1"),
    ("TORCH_MONKEY", "1"),
    ("NCCL_IB_PKEY", "1"),
    ("TRITON_PASSES", "a"),
    ("MAX_TOKENS", "4096"),
    ("PWD", "/home/u"),
    ("CUDA_X", "git+ssh://git@github.com/o/r"),
    ("CUDA_X", "https://github.com/o/r@v1"),
    ("CUDA_X", "sorted(x, key=lambda y: y), eos_token='</s>', pad_token_id=0"),
    ("CUDA_X", "KeyError: 'x'"),
    ("CUDA_X", "assert TOKEN == 3, x = 4: y"),
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    ("CUDA_X", "--eos-token </s> --pad_token=PAD --hub-token $HF_TOKEN"),
    ("CUDA_X", "--sort-key name --cache-key llama32-1b --key-dim 64 --auth no"),
    ("CUDA_X", "--password-file /run/secrets/1 --token-type bpe32000x"),
    ("CUDA_X", '{"token": "hello", "key": "model", "pad_token": "pad12345"}'),
    ("CUDA_X", "import hf_config_of_the_model_long_name, sk-learn-of-the-year-2026-package"),
    ("CUDA_X", "Basic TransformerBlock of a model"),
    ("NCCL_SECRET", ""),
]


@pytest.mark.parametrize(("name", "value"), SECRET)
def test_a_secret_is_in_no_record_no_command_line_and_no_quoted_line(name: str, value: str) -> None:
    assert is_secret(name, value)
    assert replace(ENVIRONMENT, variables={name: value}).variables == {name: SET}
    assert passed_on({name: value}) == {}
    assert SlurmOptions().wrapped(["python"], {name: value, "OMP_NUM_THREADS": "1"}) == [
        *("env", "OMP_NUM_THREADS=1", "python")
    ]


@pytest.mark.parametrize(("name", "value"), OTHERS)
def test_what_only_sounds_like_a_secret_is_kept(name: str, value: str) -> None:
    assert replace(ENVIRONMENT, variables={name: value}).variables == {name: value}
    assert without_secrets(value) == value


def test_a_record_of_before_differs_from_one_of_now_by_no_secret() -> None:
    before, now = (replace(ENVIRONMENT, variables={"NCCL_XSECRET": value}) for value in ("old", "new"))
    assert before.differences(now) == ()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("fatal: https://u:p@h/x not found", "fatal: https://<set>@h/x not found"),
        ("Authorization: Bearer abcdefghijk", "Authorization: Bearer <set>"),
        ("login(password='q w')", "login(password=<set>)"),
        ("{'HF_TOKEN': 'x y'}", "{'HF_TOKEN': <set>}"),
        ("RuntimeError: PGPASSWORD=hunter2 a", "RuntimeError: PGPASSWORD=<set> a"),
        ("E: ValueError: password=hunter2", "E: ValueError: password=<set>"),
        ("cmd=API_KEY=abc x=y", "cmd=API_KEY=<set> x=y"),
        ("x: 'secret: abc', y: 'api_key=abc'", "x: 'secret: <set>', y: 'api_key=<set>'"),
        ("aws_secret_access_key = wJalrXUtn", "aws_secret_access_key = <set>"),
    ],
)
def test_a_quoted_line_has_none(said: str, told: str) -> None:
    failure = Failure(kind="error", message=said, tail=(said,), folder="")
    assert (failure.message, failure.tail, without_secrets(told)) == (told, (told,), told)


@pytest.fixture
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent.sock")
    redaction._values.cache_clear()
    yield
    redaction._values.cache_clear()


@pytest.mark.usefixtures("_environment")
def test_a_secret_of_this_environment_is_found_wherever_it_is_quoted() -> None:
    assert without_secrets("login 0123456789abcdef by /tmp/agent.sock") == f"login {SET} by /tmp/agent.sock"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("HTTPS_PROXY is bob:hunter22@proxy:3128", "HTTPS_PROXY is bob:<set>@proxy:3128"),
        ("AccountKey=abcdef0123456789==", "AccountKey=<set>"),
        ("Authorization: token 0123456789abcdef", "Authorization: token <set>"),
        ("PASS: tests/x ok; KEY: model.norm missing", "PASS: tests/x ok; KEY: model.norm missing"),
        ('{"API_KEY": "abc"}', '{"API_KEY": <set>}'),
        ("RuntimeError: PGPASSWORD=hunter2", "RuntimeError: PGPASSWORD=<set>"),
        ("at 12:30@node rank0:3", "at 12:30@node rank0:3"),
    ],
)
def test_other_forms_of_secrets_and_words_that_are_none(text: str, told: str) -> None:
    assert without_secrets(text) == told


def test_secrets_of_the_environment_are_found_as_they_are_quoted(
    monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    pem = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\nAQEFAASCBKcwggSjAgEAAoIB\n-----END KEY-----"
    for name, value in {
        "AWS_SECRET_ACCESS_KEY": "/wJalrXUtnFEMI/K7MDENG",
        "PGPASSWORD": "correcthorse",
        "TLS_KEY": pem,
    }.items():
        monkeypatch.setenv(name, value)
    redaction._values.cache_clear()
    try:
        text = f"key /wJalrXUtnFEMI/K7MDENG, pass correcthorse, {pem!r}, AQEFAASCBKcwggSjAgEAAoIB"
        golden(without_secrets(text))
    finally:
        monkeypatch.undo()
        redaction._values.cache_clear()


_MANY = "aB3" * 16
#: By who issues it: each form of it, with what stays before it.
ISSUED = {
    "Hugging Face": [f"hf_{_MANY}"],
    "GitHub": [f"ghp_{_MANY}", f"ghs_{_MANY}", f"github_pat_{_MANY}"],
    "GitLab": [f"glpat-{_MANY}"],
    "Slack": [f"xoxb-{_MANY}", f"https://hooks.slack.com/services/ T0{_MANY}/B0/{_MANY}"],
    "OpenAI and others": [f"sk-{_MANY}", f"sk-ant-{_MANY}"],
    "NVIDIA": [f"nvapi-{_MANY}"],
    "Weights & Biases": [f"wandb_v1_{_MANY}"],
    "npm": [f"npm_{_MANY}"],
    "AWS": [f"AKIA{'A1' * 8}", f"ASIA{'A1' * 8}"],
    "JSON web tokens": [f"eyJ{_MANY}.{_MANY}.{_MANY}"],
    "Google": [f"AIza{_MANY}", f"ya29.{_MANY}"],
    "Docker": [f"dckr_pat_{_MANY}"],
    "PyPI": [f"pypi-{_MANY}"],
    "Databricks": [f"dapi{'0a' * 16}"],
    "Replicate": [f"r8_{_MANY}"],
    "SendGrid": [f"SG.{_MANY}.{_MANY}"],
    "Discord": [f"https://discord.com/api/webhooks/ 123/{_MANY}"],
    "PEM": [f"-----BEGIN RSA PRIVATE KEY-----\n{_MANY}\n-----END RSA PRIVATE KEY-----"],
}


@pytest.mark.parametrize("issuer", shipped(redaction.__file__, "secrets.ini")["issued"])
def test_what_each_issuer_marks_is_found_in_prose(issuer: str) -> None:
    for form in ISSUED[issuer]:
        stays, is_url, secret = form.rpartition("/ ")
        kept = f"{stays}{is_url.strip()}"
        assert without_secrets(f"it sent {kept}{secret} twice") == f"it sent {kept}{SET} twice"


@pytest.mark.parametrize("name", ["NCCL_XAPIKEY", "NCCL_XSSHKEYS", "NCCL_SSHPASS", "NCCL_DBPASS", "NCCL_XTOKENS"])
def test_words_that_are_glued_to_others_mark_a_secret(name: str) -> None:
    assert is_secret(name, "x")

"""Where settings come from and which are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from qwen35rt.config import SAMPLING_LIMITS
from qwen35rt.errors import ConfigError
from qwen35rt.server.settings import ServerSettings, is_loopback, read_settings


def test_flag_then_environment_then_file_then_default(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('port = 1\nparallel = 1\nctx-size = 1\nalias = ["a", "b"]\nsse_ping = 3\n')
    found = read_settings(
        {"port": 3, "host": None},
        str(file),
        {"QWEN35RT_PORT": "2", "QWEN35RT_PARALLEL": "2", "QWEN35RT_HOST": "", "QWEN35RT_CTX": "9"},
    )
    assert (found.port, found.parallel, found.ctx_size, found.host) == (3, 2, 1, "127.0.0.1")
    assert (found.alias, found.sse_ping) == (("a", "b"), 3.0)
    assert read_settings({}, None, {}) == ServerSettings()


def test_texts_of_the_environment_become_values() -> None:
    variables = {
        "API_KEY": "k1, k2",
        "STRICT_FIELDS": "true",
        "TEMPERATURE": "0.5",
        "NO_SLOTS": "0",
        "METRICS_COMPAT": "vllm",
    }
    found = read_settings({}, None, {f"QWEN35RT_{k}": v for k, v in variables.items()})
    assert (found.api_key, found.strict_fields, found.no_slots) == (("k1", "k2"), True, False)
    assert found.sampling == {"temperature": 0.5}
    assert found.metrics_compat == ("vllm",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("port", "80"),
        ("parallel", 0),
        ("threads", 0),
        ("queue", -1),
        ("write_timeout", -1.0),
        ("max_body", 0),
        ("temperature", 3.0),
        ("top_p", -1.0),
        ("device", "tpu"),
        ("n_gpu_layers", -2),
        ("n_gpu_layers", "many"),
        ("metrics_compat", ["x"]),
        ("no_such", 1),
        ("ssl_key_file", "x"),
        ("sse_ping", float("nan")),
    ],
)
def test_values_that_cannot_be_used(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name.replace("_", ".")):
        read_settings({name: value}, None, {})


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("port = ")
    for config in (str(bad), str(tmp_path / "none.toml")):
        with pytest.raises(ConfigError, match="config"):
            read_settings({}, config, {})
    with pytest.raises(ConfigError, match="api-key-file"):
        read_settings({"api_key_file": str(tmp_path / "none")}, None, {}).keys()


def test_an_open_bind_needs_a_key_or_a_word() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "box.lan"):
        with pytest.raises(ConfigError, match="allow-unauthenticated"):
            read_settings({"host": host}, None, {})
        read_settings({"host": host, "api_key": ["k"]}, None, {})
        read_settings({"host": host, "allow_unauthenticated": True}, None, {})
    for host in ("localhost", "127.0.0.1", "127.3.4.5", "::1", "[::1]", "a.localhost"):
        assert is_loopback(host)


def test_keys_of_flag_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two  \n")
    assert ServerSettings(api_key=("three", " "), api_key_file=str(file)).keys() == {"one", "two", "three"}


def test_keys_that_are_empty_do_not_open_the_server(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n \n")
    for settings in (ServerSettings(api_key=("",)), ServerSettings(api_key_file=str(file))):
        with pytest.raises(ConfigError, match="no key"):
            settings.keys()


def test_queue_grows_with_the_slots() -> None:
    assert [ServerSettings(parallel=n).queue_places for n in (1, 16, 100)] == [64, 64, 400]
    assert ServerSettings(queue=0).queue_places == 0


def test_limits_are_flags() -> None:
    names = {f.name for f in dataclasses.fields(ServerSettings)}
    assert names >= {"max_body", "max_header", "max_headers", "max_json_depth", "max_prompts", "max_open"}
    assert ServerSettings().sampling_limits == SAMPLING_LIMITS
    lists = ServerSettings(max_stops=1, max_stop_token_ids=2, max_logit_bias=3, max_logprobs=4).sampling_limits
    assert (lists.max_stops, lists.max_stop_token_ids, lists.max_biases, lists.max_logprobs) == (1, 2, 3, 4)

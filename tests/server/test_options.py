"""Options of `pace serve`, and their error messages."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import fields

import pytest

from pace.server.limits import Limits
from pace.server.options import ServeOptions, read_keys


def options(**more) -> ServeOptions:
    return ServeOptions(**{"model": "tiny", **more})


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Two certificates for `localhost` with their keys, and an encrypted key: `{name: path}`."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make a certificate with")
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("one", "two"):
        make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
        more = ["-addext", "subjectAltName=DNS:localhost", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run([*make.split(), *more], cwd=folder, check=True, capture_output=True)
    encrypt = "openssl pkey -in one.key -aes128 -passout pass:secret -out encrypted.key"
    subprocess.run(encrypt.split(), cwd=folder, check=True, capture_output=True)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize(
    "fields, message",
    [({"port": 65536}, "port must be from 0 to 65535; got 65536"), ({"port": True}, "port"),
     ({"host": ""}, "host must be an address"), ({"host": "http://localhost"}, "host must be an address"),
     ({"host": "[::1]"}, "host must be an address"), ({"host": "0.0.0.0"}, "PACE_API_KEY"),
     ({"host": "::"}, "PACE_API_KEY"), ({"host": "localhost.example.org"}, "PACE_API_KEY"),
     ({"served_model_names": ("a", "")}, "served_model_names: ''"), ({"served_model_names": ("a" * 129,)}, "1 to 128"),
     ({"served_model_names": ("a\nb",)}, "printable"), ({"keys": ("good", "with space")}, "key 2 of 2"),
     ({"keys": ("schlüssel",)}, "ASCII"), ({"tls_certificate": "/no/such/file"}, "give both"),
     ({"tls_certificate": "/no/such/file", "tls_key": "/no/such/file"}, "cannot read /no/such/file"),
     ({"cors_origins": ("*",)}, "without a key"),
     ({"cors_origins": ("https://a.example/",), "keys": ("k",)}, "without a path"),
     ({"cors_origins": ("a.example",)}, "must be scheme"), ({"cors_origins": ("null",)}, "must be scheme"),
     ({"allowed_hosts": ("http://a.example",)}, "without scheme"),
     ({"allowed_hosts": ("a.example:80",)}, "without scheme and port"), ({"allowed_hosts": ("*",)}, "allowed_hosts"),
     ({"metrics_prefix": "a-b"}, "metrics_prefix")],
    ids=str,
)  # fmt: skip
def test_wrong_options_are_refused(fields, message):
    with pytest.raises(ValueError) as error:
        options(**fields)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not any(key in str(error.value) for key in fields.get("keys", ()) if len(key) > 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LocalHost"])
def test_this_machine_needs_no_key(host):
    assert options(host=host).is_local


def test_other_machines_need_a_key():
    assert not options(host="0.0.0.0", keys=("k",)).is_local
    assert options(host="0.0.0.0", uds="/tmp/socket").is_local


def test_keys_are_not_shown():
    assert "secret" not in repr(options(keys=("secret",)))


def test_the_hosts_that_requests_may_name():
    assert options().hosts == {"localhost", "127.0.0.1", "::1"}
    assert options(allowed_hosts=("A.example",), host="127.0.0.2").hosts >= {"a.example", "127.0.0.2", "localhost"}
    assert options(keys=("k",)).hosts is None and options(uds="/tmp/socket").hosts is None
    assert options(keys=("k",), allowed_hosts=("a.example",)).hosts == {"a.example"}


def test_names_of_the_model(tmp_path):
    def name(model, **more):
        return options(model=model, **more).model_names

    (tmp_path / "llama").mkdir()
    (tmp_path / "qwen.Q4_0.gguf").touch()
    assert name(tmp_path / "llama") == name(f"{tmp_path}/llama/") == ("llama",)
    assert name(tmp_path / "qwen.Q4_0.gguf") == ("qwen.Q4_0",)
    assert name("org/model-1b") == ("org/model-1b",)
    assert name("org/model-1b", served_model_names=("gpt-4", "b")) == ("gpt-4", "b")


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variable, of_variable, of_both",
    [(None, (), ("one", "two", "three")), ("", (), ("one", "two", "three")),
     (" a, b,,a", ("a", "b"), ("a", "b", "one", "two", "three")),
     ("two,zero", ("two", "zero"), ("two", "zero", "one", "three"))],
)  # fmt: skip
def test_keys_come_from_the_environment_and_a_file(tmp_path, monkeypatch, variable, of_variable, of_both):
    if variable is None:
        monkeypatch.delenv("PACE_API_KEY", raising=False)
    else:
        monkeypatch.setenv("PACE_API_KEY", variable)
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n  two  # of Bob\nthree\n")
    assert read_keys() == of_variable and read_keys(file) == of_both


def test_a_file_without_keys_is_refused(tmp_path):
    file = tmp_path / "keys"
    for text in ("", "# none\n\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match="has no key"):
            read_keys(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text"):
        read_keys(file)
    with pytest.raises(ValueError, match="cannot read"):
        read_keys(tmp_path / "absent")
    with pytest.raises(ValueError, match="cannot read"):
        read_keys(tmp_path)


# -- TLS ---------------------------------------------------------------------------------------------------------------


def test_a_certificate_goes_with_its_key(certificates):
    made = options(tls_certificate=certificates["one.pem"], tls_key=certificates["one.key"])
    assert isinstance(made.tls_context(), ssl.SSLContext) and made.scheme == "https"
    assert options().tls_context() is None and options().scheme == "http"


@pytest.mark.parametrize(
    "certificate, key",
    [("one.pem", "two.key"), ("one.key", "one.key"), ("one.pem", "one.pem"), ("one.pem", "encrypted.key")],
)
def test_a_certificate_that_does_not_fit_is_refused(certificates, certificate, key):
    with pytest.raises(ValueError, match="tls_certificate=.*tls_key=") as error:
        options(tls_certificate=certificates[certificate], tls_key=certificates[key])
    assert "\n" not in str(error.value)


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", Limits.names())
def test_limits_are_numbers_above_zero(name):
    for value in (-1, "1", True, float("nan"), float("inf")):
        with pytest.raises((TypeError, ValueError), match=f"^{name} must be"):
            Limits(**{name: value})
    least = 0 if name in ("max_queue", "max_wait", "drain_seconds") else 1
    Limits(**{name: least})
    if least:
        with pytest.raises(ValueError, match=f"^{name} must be"):
            Limits(**{name: 0})


def test_defaults_hold():
    assert [field.name for field in fields(Limits)] == Limits.names()
    assert options().limits == Limits()

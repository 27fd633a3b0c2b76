"""Options of `pace serve`. All are checked here, before a port is opened."""

from __future__ import annotations

import ipaddress
import math
import re
import ssl
from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from pace import env
from pace.naming import shown
from pace.server.limits import Limits

KEYS_VARIABLE = "PACE_API_KEY"
MEDIA = ("image", "audio")
TASKS = ("generate", "embed")
OF_A_MODEL = ("task", "dimensions", "media", "max_image_tokens")
"""Fields of ServeOptions that each of several models may have for itself."""
HOST = r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)"
"""A name, or an address; one of IPv6 in brackets."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ModelEntry:
    """One of several models of a server."""

    names: tuple[str, ...]
    """Names in requests; the first is its id."""
    model: str
    """The model, as in `LoadOptions`."""
    arguments: Namespace = field(default_factory=Namespace, compare=False)
    """The command line's options for loading, with the model's own."""
    idle_unload: float | None = None
    """Its own value of `ServeOptions.idle_unload`."""
    load_on_startup: bool = True
    """False to load the model with its first request."""


@dataclass(frozen=True)
class ServeOptions:
    """Model to serve, address, clients, and limits.

    Raises TypeError or ValueError that names the field.
    """

    model: str | Path
    """The model, as in `LoadOptions`, which has the options for loading: checking those needs torch."""
    host: str = "127.0.0.1"
    """Address or name to listen at. Addresses that other machines can reach need API keys."""
    port: int = 8000
    """Port to listen at; 0 for any free one."""
    uds: str | Path | None = None
    """Path of a unix socket to listen at instead. Only this user may connect to it."""
    models: tuple[ModelEntry, ...] = ()
    """All models, if there are several, or one with a name. `model` is the first one's."""
    served_model_names: tuple[str, ...] = ()
    """Names of the model in requests; the first is its id. Default: the last part of its path, or its Hub id."""
    idle_unload: float | None = None
    """Seconds without a request after which a model's weights are freed; the next request loads it again. Default:
    models stay loaded."""
    any_model_name: bool = False
    """Accepts any model name in requests, and answers with this model."""
    keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys of clients (`read_keys`). Without keys, all clients are served."""
    tls_certificate: str | Path | None = None
    """PEM file of the certificate and its intermediate certificates."""
    tls_key: str | Path | None = None
    """PEM file of the certificate's private key."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call this server from a browser, such as "https://chat.example.org"; "*" for all."""
    allowed_hosts: tuple[str, ...] = ()
    """Additional names allowed in `Host`. Without keys, names other than this machine's own are refused."""
    limits: Limits = field(default_factory=Limits)
    media: tuple[str, ...] | None = None
    """Media that requests may have: image, audio or image,audio; none for text only. Default: all that the model
    takes."""
    media_hosts: tuple[str, ...] = ()
    """Hosts whose images requests may name by URL, as HOST or HOST:PORT: without a port, that of http and https. The
    server fetches them. By default, it fetches nothing."""
    task: str | None = None
    """What the model is for: generate, or embed for vectors, ranks, scores and labels of texts. Default: embed for an
    encoder, generate for other models."""
    dimensions: int | None = None
    """Dimensions of the vectors of a request that names none. Default: all that the model has."""
    max_image_tokens: int = 1280
    """Maximum number of tokens of an image. One with more pixels is made smaller."""
    prefix_dir: str | Path | None = None
    """Folder of kept prefixes: beginnings of prompts that are computed once, also for later runs. Default: none are
    kept."""
    lora: tuple[tuple[str, str | Path], ...] = ()
    """LoRA adapters, as NAME=PATH: requests name one as their model."""
    lora_dir: str | Path | None = None
    """Folder from which clients may load adapters, with POST /lora-adapters. Default: they may load none."""
    allow_priority: bool = False
    """Lets requests ask to be served before others."""
    strict: bool = False
    """Refuses requests with unknown fields. By default, these are ignored, and named in the answer's headers."""
    access_log: bool = False
    """Logs each request in a line on stderr: its id, model, status, numbers of tokens and times, and no text."""
    metrics_prefix: str = "pace"
    """Prefix of metric names: "vllm" for dashboards made for vLLM."""

    def __post_init__(self) -> None:
        self._check_address()
        self._check_names()
        self._check_models()
        _check_keys(self.keys)
        self._check_tls()
        self._check_browsers()
        self._check_media()
        self._check_task()
        self._check_lora()
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.metrics_prefix):
            raise ValueError(f"metrics_prefix must be letters, digits and _; got {shown(self.metrics_prefix)}")

    # -- derived values ------------------------------------------------------------------------------------------------

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model in requests; the first is its id."""
        if self.models:
            return self.models[0].names
        return self.served_model_names or (name_of(self.model),)

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        """The models; without `models`, the only one."""
        return self.models or (ModelEntry(self.model_names, str(self.model), idle_unload=self.idle_unload),)

    def of(self, entry: ModelEntry) -> ServeOptions:
        """Returns the options of one model. Each of several has its own folder of prefixes."""
        own = {name: getattr(entry.arguments, name, getattr(self, name)) for name in OF_A_MODEL}
        own["lora"] = tuple(getattr(entry.arguments, "lora", self.lora))
        if len(self.entries) > 1:
            folder = self.prefix_dir and Path(self.prefix_dir, f"model-{quote(entry.names[0], safe='')}")
            own |= {"media_hosts": (), "prefix_dir": folder}
        return replace(self, model=entry.model, models=(), served_model_names=entry.names, **own)

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        return self.uds is not None or _is_loopback(self.host)

    @property
    def hosts(self) -> frozenset[str] | None:
        """Allowed values of `Host`, in lower case and without a port; None for any.

        A page whose name was made to point at this machine (DNS rebinding) sends its own name there. That matters if no
        key is needed. No page reaches a unix socket.
        """
        named = frozenset(name.lower() for name in self.allowed_hosts)
        if self.keys or self.uds is not None:
            return named or None
        return named | {*LOCAL_NAMES, self.host.lower()}

    @property
    def scheme(self) -> str:
        return "http" if self.tls_certificate is None else "https"

    def tls_context(self) -> ssl.SSLContext | None:
        """Returns the TLS context of the certificate; None for plain HTTP. Raises ValueError if the certificate does
        not match its key."""
        if self.tls_certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # Never ask for a password on the terminal: an encrypted key is refused.
            context.load_cert_chain(self.tls_certificate, self.tls_key, password=lambda: "")
        except ssl.SSLError as error:
            why = (error.reason or str(error)).replace("_", " ").lower()
            raise ValueError(
                f"tls_certificate={self.tls_certificate} and tls_key={self.tls_key} must be a PEM certificate and its "
                f"unencrypted private key ({why})"
            ) from None
        return context

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_address(self) -> None:
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535; got {shown(self.port)}")
        if not self.host or any(character in self.host for character in "/ []"):
            raise ValueError(f"host must be an address or a name, such as 127.0.0.1 or ::1; got {shown(self.host)}")
        if not self.is_local and not self.keys:
            raise ValueError(
                f"host={self.host} is reachable from other machines, which needs a key: "
                f"set {KEYS_VARIABLE} or api_key_file"
            )

    def _check_names(self) -> None:
        max_characters = self.limits.name_characters
        for name in (*self.served_model_names, *(name for entry in self.models for name in entry.names)):
            if not 0 < len(name) <= max_characters or not name.isprintable() or name != name.strip():
                what = "models" if self.models else "served_model_names"
                raise ValueError(f"{what}: {shown(name)} must be 1 to {max_characters} printable characters")

    def _check_models(self) -> None:
        if self.models and self.served_model_names:
            raise ValueError("served_model_names is for one model; give each of several its name with NAME=MODEL")
        names = [name for entry in self.models for name in entry.names]
        names += [name for entry in self.models for name, _ in getattr(entry.arguments, "lora", ())]
        if len(self.models) > 1 and self.lora:
            raise ValueError("lora is for one model; give the adapters of each of several in its table of --models")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"models: two of them have the name {shown(twice)}; give each a name of its own")
        for seconds in (self.idle_unload, *(entry.idle_unload for entry in self.models)):
            if seconds is None:
                continue
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
                raise TypeError(f"idle_unload must be a number of seconds; got {shown(seconds)}")
            if not 0 < seconds < math.inf:
                raise ValueError(f"idle_unload must be a number of seconds above 0; got {seconds!r}")

    def _check_media(self) -> None:
        unknown = [kind for kind in self.media or () if kind not in MEDIA]
        if unknown or len(set(self.media or ())) < len(self.media or ()):
            raise ValueError(f"media must be {' or '.join(MEDIA)}, both or none; got {shown(','.join(self.media))}")
        for host in self.media_hosts:
            if not re.fullmatch(rf"{HOST}(:[0-9]{{1,5}})?", host, re.IGNORECASE | re.ASCII):
                raise ValueError(
                    f"media_hosts: {shown(host)} must be HOST or HOST:PORT, without a scheme, and an IPv6 address in "
                    "brackets"
                )
        if self.media_hosts and self.media is not None and "image" not in self.media:
            raise ValueError("media_hosts needs media=image: without it, requests have no images")
        if isinstance(self.max_image_tokens, bool) or not isinstance(self.max_image_tokens, int):
            raise TypeError(f"max_image_tokens must be a whole number; got {shown(self.max_image_tokens)}")
        if self.max_image_tokens < 1:
            raise ValueError(f"max_image_tokens must be at least 1; got {self.max_image_tokens}")

    def _check_task(self) -> None:
        if self.task not in (None, *TASKS):
            raise ValueError(f"task must be {' or '.join(TASKS)}; got {shown(self.task)}")
        if self.dimensions is None:
            return
        if isinstance(self.dimensions, bool) or not isinstance(self.dimensions, int):
            raise TypeError(f"dimensions must be a whole number; got {shown(self.dimensions)}")
        if self.dimensions < 1:
            raise ValueError(f"dimensions must be at least 1; got {self.dimensions}")
        if self.task == "generate":
            raise ValueError("dimensions needs task=embed: a model that generates text makes no vectors")

    def _check_lora(self) -> None:
        names = [*self.model_names, *(name for name, _ in self.lora)]
        for name, _ in self.lora:
            if not 0 < len(name) <= self.limits.name_characters or not name.isprintable() or name != name.strip():
                raise ValueError(f"lora: {shown(name)} must be 1 to {self.limits.name_characters} printable characters")
            if names.count(name) > 1:
                raise ValueError(f"lora: two models or adapters have the name {shown(name)}; give each one of its own")
        if self.lora_dir is not None and not Path(self.lora_dir).expanduser().is_dir():
            raise ValueError(f"lora_dir: {self.lora_dir} is not a folder")

    def _check_tls(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("give both tls_certificate and tls_key, or neither for plain HTTP")
        for name in ("tls_certificate", "tls_key"):
            if getattr(self, name) is not None:
                _read(name, getattr(self, name))
        self.tls_context()

    def _check_browsers(self) -> None:
        for origin in self.cors_origins:
            if origin == "*":
                if not self.keys:
                    raise ValueError(
                        "cors_origins=* without a key would let every web page that you open use this server: "
                        "set a key, or list the origins"
                    )
            elif not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s,*@]+", origin):
                raise ValueError(
                    f"cors_origins: {shown(origin)} must be scheme://host or scheme://host:port, in lower case "
                    f"and without "
                    "a path"
                )
        for name in self.allowed_hosts:
            if not re.fullmatch(r"[A-Za-z0-9._-]+|[0-9a-fA-F:.]+", name) or re.search(r"^[^:]*:[^:]*$", name):
                raise ValueError(f"allowed_hosts: {shown(name)} is not a name or an address, without scheme and port")


def read_keys(path: str | Path | None = None) -> tuple[str, ...]:
    """Returns the keys of PACE_API_KEY, separated by commas, and of a file, one per line; `#` begins a comment.

    Raises ValueError for a file without keys, or one that cannot be read.
    """
    keys = [key.strip() for key in (env.value(KEYS_VARIABLE) or "").split(",")]
    if path is not None:
        in_file = [line.partition("#")[0].strip() for line in _read("api_key_file", path).splitlines()]
        if not any(in_file):
            raise ValueError(f"api_key_file: {path} has no keys; write one per line")
        keys += in_file
    return tuple(dict.fromkeys(key for key in keys if key))


def _check_keys(keys: tuple[str, ...]) -> None:
    for number, key in enumerate(keys, 1):
        if not re.fullmatch(r"[\x21-\x7e]+", key):
            raise ValueError(
                f"keys: key {number} of {len(keys)} must be printable ASCII without spaces, to fit in a header"
            )


def _read(name: str, path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ValueError(f"{name}: cannot read {path} ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{name}: {path} is not a text file") from None


def _is_loopback(host: str) -> bool:
    """True for loopback addresses. The only accepted name is `localhost`: others may resolve to anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def name_of(model: str | Path) -> str:
    """Returns the default name of a model: the last part of its path, or its Hub id."""
    path = Path(model)
    if not path.exists():
        return str(model)
    return path.resolve().stem if path.is_file() else path.resolve().name

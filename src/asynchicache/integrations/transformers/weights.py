"""What a model computes with: its weights, and the adapters that are active.

A prefix of other weights has other bytes, so both are a part of its key. Adapters are known by the content of
their weights: storage outlives a name. What the model's own weights are when the cache is opened, the option
`weight_version` says; here only a change after that is noticed, unless `update_weights` names it.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from asynchicache.errors import ConfigError, UsageError

_ADAPTERS = frozenset(
    {"ADALORA", "BOFT", "FOURIERFT", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "OFT", "RANDLORA"}
    | {"SHIRA", "VERA"}
)
"""Types of PEFT whose layers compute each token from that token and their weights alone."""

_SAMPLES = 32
"""Values of each tensor that are compared, from its first to its last."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the model that a wrapper of PEFT has put its adapters into; a model of transformers as it is.

    Raises:
        ConfigError: it is neither, or its adapters give more than weights, such as prompts.
    """
    if isinstance(model, PreTrainedModel):
        return model
    if not hasattr(model, "get_base_model"):
        raise ConfigError(no_model(model))
    check_adapters(model)
    base = cast("Any", model).get_base_model()
    if not isinstance(base, PreTrainedModel):
        raise ConfigError(no_model(base))
    return base


def no_model(given: object) -> str:
    if isinstance(given, str | PathLike):
        folder = str(given)
        return f"{folder!r} is a path, not a model: AutoModelForCausalLM.from_pretrained({folder!r}) loads it"
    cure = ": build the model, and pass that" if isinstance(given, PreTrainedConfig) else ""
    return f"a {type(given).__name__} is no model of transformers{cure}"


def check_adapters(model: nn.Module) -> None:
    """
    Raises:
        ConfigError: an adapter of the model is of a kind whose keys depend on more than tokens and weights.
    """
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
        if kind not in _ADAPTERS or getattr(adapter, "alora_invocation_tokens", None):
            what = f"{kind} with invocation tokens" if kind in _ADAPTERS else kind
            raise ConfigError(
                f"adapter {name!r} is {what}: whether its keys follow from tokens and weights alone is not "
                f"known here; served are {', '.join(sorted(_ADAPTERS))}"
            )


class ModelWeights:
    """Notices when a model computes with other weights than before.

    A look reads hooks, and addresses and version counters of all tensors but those that a model computes from
    its configuration. On a CPU it reads some values of each too, because an assignment through `.data` counts
    no version. On a GPU, where reading values would wait for the stream, such an assignment in place is not
    noticed; nor is one of a few values of a large tensor.

    Attributes:
        key: names weights and adapters for the keys of pages; empty for those of the time of opening, without
            adapters.
        changes: how often a look found something else than the one before.
    """

    def __init__(self, model: PreTrainedModel, version: Callable[[], str | None]) -> None:
        """`version`: of the weights, as the cache has it now; under another one a change is no surprise."""
        self.key = ""
        self._version = version
        self._named = version()
        self.changes = 0
        self._model = model
        self._change = ""
        self._base: tuple[object, ...] = ()
        self._adapters: tuple[object, ...] = ()
        self.look()
        self.changes, self._change = 0, ""
        self.key = self._key()

    def look(self) -> None:
        """Update `key` and `changes`.

        Raises:
            UsageError: an adapter is active whose keys depend on more than tokens and weights.
        """
        try:
            check_adapters(self._model)
        except ConfigError as error:
            raise UsageError(str(error)) from error
        base, adapters = _stamps(self._model)
        version, named = self._version(), self._named
        if version != named:
            self._change = ""  # `update_weights` was called, and has hidden the pages of before
        elif base != self._base:
            self._change = uuid.uuid4().hex  # no earlier page, of whatever process, is of these
        if (version, base, adapters) != (named, self._base, self._adapters):
            self._named, self._base, self._adapters = version, base, adapters
            self.changes += 1
            self.key = self._key()

    def salted(self, salt: str | None) -> str | None:
        """Return the salt that keeps prefixes of these weights apart from those of others."""
        return salt if not self.key else f"{self.key}\0" + ("" if salt is None else f"={salt}")

    def _key(self) -> str:
        adapters = _adapter_digest(self._model)
        if not (self._change or adapters):
            return ""
        return hashlib.sha256(f"{self._change}/{adapters}".encode()).hexdigest()


def _stamps(model: nn.Module) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """What is compared of the model's own weights and hooks, and of its adapters."""
    own: list[tuple[str, torch.Tensor]] = []
    hooks: list[object] = []  # and methods that were replaced, as whoever steers a model does
    added: list[tuple[str, torch.Tensor]] = []
    settings: list[object] = []
    inside: str | None = None  # the adapter's layer that the walk is in
    for name, module in model.named_modules():
        if inside is not None and not name.startswith(inside):
            inside = None
        if _is_adapter(module):
            settings.append((name, *_settings(module)))
            inside = f"{name}."
        of_adapter = inside is not None and "base_layer" not in name.removeprefix(inside).split(".")
        fields = vars(module)  # its methods for this are ten times slower, and there are many modules
        hooked = fields["_forward_pre_hooks"], fields["_forward_hooks"], fields.get("forward")
        if any(hooked):
            hooks.append((name, *hooked[0].values(), *hooked[1].values(), hooked[2]))
        computed = fields["_non_persistent_buffers_set"]  # from the configuration: no weights
        for held in (fields["_parameters"], fields["_buffers"]):
            for key, one in held.items():
                if one is not None and key not in computed:
                    (added if of_adapter else own).append((f"{name}.{key}", one))
    return (hooks, *_stamp(own)), (tuple(settings), _stamp(added))


def _stamp(tensors: list[tuple[str, torch.Tensor]]) -> tuple[object, ...]:
    return (
        tuple((name, tuple(one.shape), one.dtype, _address(one), _version(one)) for name, one in tensors),
        _sampled([one for _, one in tensors if type(one) in _PLAIN and one.device.type == "cpu"]),
    )


_PLAIN = (torch.Tensor, nn.Parameter)


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if type(tensor) in _PLAIN else id(tensor)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  torch has no other name for it


def _sampled(tensors: list[torch.Tensor]) -> bytes:
    """Some values of each tensor in a CPU's memory."""
    rows: dict[int, list[torch.Tensor]] = {}
    for one in tensors:
        size = one.element_size()
        ends = (one.storage_offset() + one.numel()) * size
        if one.numel() and size in _INTEGERS and ends <= one.untyped_storage().nbytes():
            stride = max((one.numel() - 1) // (_SAMPLES - 1), 1)
            count = (one.numel() - 1) // stride + 1
            flat = torch.as_strided(one.detach(), (count,), (stride,), one.storage_offset())
            rows.setdefault(size, []).append(flat.view(_INTEGERS[size]))
    return b"".join(torch.cat(rows[size]).numpy().tobytes() for size in sorted(rows))


# Adapters: the layers of PEFT, known by what they have, as PEFT need not be installed.


def _is_adapter(module: nn.Module) -> bool:
    """Whether a module is a layer of the wrapped model with adapters beside it."""
    return hasattr(type(module), "merged_adapters") and hasattr(type(module), "active_adapters")


def _settings(layer: Any) -> tuple[tuple[str, ...], bool, tuple[str, ...], tuple[str, ...]]:
    active = list(layer.active_adapters)
    scaling = getattr(layer, "scaling", {})
    factors = [repr(scaling.get(name)) for name in active] if isinstance(scaling, Mapping) else []
    return tuple(active), bool(layer.disable_adapters), tuple(layer.merged_adapters), tuple(factors)


def _adapter_digest(model: nn.Module) -> str:
    """A digest of the adapters that take part in a forward, their settings and their weights; or empty."""
    digest, found = hashlib.sha256(), False
    for name, layer in model.named_modules():
        if not _is_adapter(layer):
            continue
        settings = active, disabled, *_ = _settings(layer)
        if disabled or not active:
            continue
        found = True
        digest.update(json.dumps([name, type(layer).__name__, *settings]).encode())
        for part, tensor in _active_tensors(layer, active):
            digest.update(f"{part} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if found else ""


def _active_tensors(layer: Any, active: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a layer's adapters, except those of adapters that are not active."""
    named = (getattr(layer, name, None) for name in layer.adapter_layer_names)
    known = {
        key for one in named if isinstance(one, Mapping | nn.ModuleDict | nn.ParameterDict) for key in one
    }
    idle = known - set(active)
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        parts = name.split(".")
        if parts[0] != "base_layer" and not idle.intersection(parts):
            yield name, tensor

"""What `memopt report TARGET` is about: a factory, a transformers config or a saved profile, made into a workload.

From a config.json the model is built on the meta device: a 70B model takes no memory here.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from memopt.errors import MemoptError, UnsupportedError
from memopt.profiler.profile import Profile
from memopt.workload import Workload


class TargetError(MemoptError, ValueError):
    """The target, or an option with it, can't be followed; the message says what would be."""


class OptimizerChoice(StrEnum):
    """Optimizers that the command line can make."""

    ADAMW = "adamw"
    ADAMW_FUSED = "adamw-fused"
    SGD = "sgd"
    NONE = "none"

    def over(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """The optimizer over the model's trainable parameters, None for "none"."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self is OptimizerChoice.NONE or not parameters:
            return None
        if self is OptimizerChoice.SGD:
            return torch.optim.SGD(parameters)
        return torch.optim.AdamW(parameters, fused=True if self is OptimizerChoice.ADAMW_FUSED else None)


class DtypeChoice(StrEnum):
    """Types of the parameters of a model that is built from a config."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Wishes of the command line; None: as the target has it."""

    batch: int | None = None
    seq: int | None = None
    optimizer: OptimizerChoice | None = None
    dtype: DtypeChoice | None = None
    micro_batches: int | None = None

    def given(self) -> dict[str, Any]:
        """The wishes that were made, by the name of their option."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A workload or, from a file, its profile. `about` says in a line what it is."""

    name: str
    about: str
    workload: Workload | None = None
    profile: Profile | None = None
    rebatched: Callable[[int], Workload] | None = None  # the same workload with another batch
    batch: int | None = None


def load_target(text: str, options: Options) -> Target:
    """The target that `text` names.

    Raises TargetError for what can't be found, read or combined, or if the user's code fails (with its file and line);
    UnsupportedError for a model whose inputs are not known here.
    """
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return _from_json(text, path, options)
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise TargetError(
            f"{text!r} is no target: give module:factory, path/file.py:factory, a transformers config.json "
            "or a profile that memopt saved"
        )
    return _from_factory(text, _factory_in(where, name), options)


# Factories


def _factory_in(where: str, name: str) -> Any:
    found: Any = _module_at(where)
    for part in name.split("."):
        if not hasattr(found, part):
            known = sorted(n for n, v in vars(found).items() if callable(v) and not n.startswith("_"))
            hint = f"; it has {', '.join(known[:12])}" if known else ""
            raise TargetError(f"{where} has no {name!r}{hint}")
        found = getattr(found, part)
    return found


def _module_at(where: str) -> ModuleType:
    path = Path(where)
    if path.suffix == ".py":
        if not path.is_file():
            raise TargetError(f"no file {where}")
        spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        _put_on_path(path.resolve().parent)
        with _users_code(f"importing {where}"):
            sys.modules.setdefault(path.stem, module)  # as `import` does: dataclasses and pickle look there
            spec.loader.exec_module(module)
        return module
    _put_on_path(Path.cwd())
    try:
        is_there = importlib.util.find_spec(where) is not None
    except (ImportError, ValueError):
        is_there = False
    except Exception as e:  # a parent package's own code
        raise TargetError(f"importing {where} fails at {users_line(e)}") from e
    if not is_there:
        raise TargetError(f"no module {where!r} can be imported from here; for a file write path/file.py:factory")
    with _users_code(f"importing {where}"):
        return importlib.import_module(where)


def _put_on_path(folder: Path) -> None:
    """As `python file.py` has it. The folder stays: a factory may import more when it is called."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@contextmanager
def _users_code(doing: str) -> Iterator[None]:
    try:
        yield
    except MemoptError:
        raise
    except (Exception, SystemExit) as e:
        raise TargetError(f"{doing} fails at {users_line(e)}") from e


def users_line(e: BaseException) -> str:
    """Where the user's code raised and what: `file.py:12 "code": ValueError: text`."""
    if isinstance(e, SyntaxError) and e.filename:
        return f'{e.filename}:{e.lineno} "{(e.text or "").strip()}": {type(e).__name__}: {e.msg}'
    frames = traceback.extract_tb(e.__traceback__)
    own, torchs = str(Path(__file__).resolve().parent), str(Path(torch.__file__).parent)
    theirs = [
        f
        for f in frames
        if not str(Path(f.filename).resolve()).startswith((own, torchs, sys.base_prefix, sys.prefix))
        and not f.filename.startswith("<")
    ]
    frame = (theirs or list(frames))[-1] if frames else None
    text = " ".join(str(e).split())
    what = f"{type(e).__name__}: {text}" if text else type(e).__name__
    return f'{frame.filename}:{frame.lineno} "{frame.line}": {what}' if frame else what


def _from_factory(text: str, factory: Any, options: Options) -> Target:
    if isinstance(factory, Workload | Mapping | nn.Module):
        made, passed = factory, dict[str, Any]()
    elif callable(factory):
        passed = _accepted(factory, options)
        _check_arguments(text, factory, passed)
        made = _called(text, factory, passed)
    else:
        raise TargetError(f"{text} is neither a function nor a Workload, but a {type(factory).__name__}")
    rest = replace(options, **dict.fromkeys(passed))
    workload = _workload_of(text, made, rest)

    def called_again(batch: int) -> Workload:
        return _workload_of(text, _called(text, factory, {**passed, "batch": batch}), replace(rest, batch=None))

    def filled_again(batch: int) -> Workload:
        return _workload_of(text, made, replace(rest, batch=batch))

    def sliced(batch: int) -> Workload:
        parts = torch.utils._pytree.tree_map(
            lambda x: x[:batch] if isinstance(x, torch.Tensor) else x, (tuple(workload.args), dict(workload.kwargs))
        )
        return replace(workload, args=parts[0], kwargs=parts[1])

    rebatched: Callable[[int], Workload] | None = None
    if not isinstance(factory, Workload | Mapping | nn.Module) and "batch" in _parameters_of(factory):
        rebatched = called_again
    elif isinstance(made, nn.Module) and _is_pretrained(made):
        rebatched = filled_again
    elif workload.loss is None:  # one with targets of its own could not take fewer outputs
        rebatched = sliced
    return Target(
        name=text,
        about=_about(workload),
        workload=workload,
        batch=_batch_of(workload),
        rebatched=rebatched,
    )


def _parameters_of(f: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(f).parameters
    except (TypeError, ValueError):
        return {}


def _accepted(factory: Callable[..., Any], options: Options) -> dict[str, Any]:
    """Of --batch, --seq and --dtype what the factory has a parameter for, as values for its call."""
    parameters = _parameters_of(factory)
    given = {k: v for k, v in options.given().items() if k in ("batch", "seq", "dtype") and k in parameters}
    return {k: getattr(torch, v.value) if isinstance(v, DtypeChoice) else v for k, v in given.items()}


def _check_arguments(text: str, factory: Callable[..., Any], passed: Mapping[str, Any]) -> None:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needs = [
        name
        for name, p in _parameters_of(factory).items()
        if p.default is inspect.Parameter.empty and p.kind not in variadic and name not in passed
    ]
    if needs:
        options = [f"--{name}" for name in needs if name in ("batch", "seq", "dtype")]
        hint = f"give {', '.join(options)}" if len(options) == len(needs) else "a factory is called without arguments"
        raise TargetError(f"{text} needs {', '.join(needs)}: {hint}")


def _called(text: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    with _users_code(f"{text}()"):
        return factory(**arguments)


def _is_pretrained(model: nn.Module) -> bool:
    """Whether it is a model of transformers, whose inputs and labels can be told from its class and config."""
    return hasattr(model, "config") and hasattr(model, "main_input_name")


def _workload_of(text: str, made: Any, options: Options) -> Workload:
    """The workload in what a factory returned, with what the command line asks for beyond the factory's parameters."""
    is_pretrained = isinstance(made, nn.Module) and _is_pretrained(made)
    nobodys = ("dtype",) if is_pretrained else ("batch", "seq", "dtype")
    if missing := [name for name in options.given() if name in nobodys]:
        wishes = ", ".join(f"--{name}" for name in missing)
        raise TargetError(
            f"{text} takes no {' and no '.join(missing)}: leave {wishes} out, or give it such a parameter"
        )
    if isinstance(made, Mapping):
        known = [f.name for f in fields(Workload)]
        if "model" not in made or set(made) - set(known):
            raise TargetError(f"{text} gives a dict of {sorted(map(str, made))}; the fields of a Workload are {known}")
        with _users_code(f"the workload of {text}"):
            made = Workload(**made)
    elif is_pretrained:
        made = workload_of_pretrained(made, options)
    elif isinstance(made, nn.Module):
        made = _workload_of_module(text, made)
    elif not isinstance(made, Workload):
        raise TargetError(
            f"{text} gives a {type(made).__name__}; needed is a memopt.Workload, a dict of its fields "
            "or a torch.nn.Module"
        )
    if options.optimizer is not None:
        made = replace(made, optimizer=options.optimizer.over(made.model))
    if options.micro_batches is not None:
        made = replace(made, micro_batches=options.micro_batches)
    workload: Workload = made
    return workload


def _workload_of_module(text: str, model: nn.Module) -> Workload:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needs = [
        name
        for name, p in _parameters_of(model.forward).items()
        if p.default is inspect.Parameter.empty and p.kind not in variadic
    ]
    if needs:
        raise TargetError(
            f"{text} gives a bare {type(model).__name__}: its forward needs {', '.join(needs)}, and neither "
            "their shapes nor the loss are known. Return memopt.Workload(model, args=(batch,), loss=..., optimizer=...)"
        )
    return Workload(model)


def _batch_of(workload: Workload) -> int | None:
    """The first size that all input tensors share, if it can be halved."""
    sizes = {t.shape[0] if t.dim() else 0 for t in _inputs_of(workload)}
    return sizes.pop() if len(sizes) == 1 else None


def _inputs_of(workload: Workload) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves((tuple(workload.args), dict(workload.kwargs)))
    return [t for t in leaves if isinstance(t, torch.Tensor)]


def _about(workload: Workload) -> str:
    """Model, parameters, inputs and optimizer in a line."""
    parameters = list(workload.model.parameters())
    num = sum(p.numel() for p in parameters)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    shapes = " ".join("x".join(map(str, t.shape)) or "scalar" for t in _inputs_of(workload)[:4])
    kind = type(workload.optimizer)
    # Only a fused one is worth a word: it holds less.
    is_fused = workload.optimizer is not None and any(g.get("fused") for g in workload.optimizer.param_groups)
    optimizer = "no optimizer" if workload.optimizer is None else f"{'fused ' if is_fused else ''}{kind.__name__}"
    accumulated = f", {workload.micro_batches} micro-batches" if workload.micro_batches > 1 else ""
    return (
        f"{type(workload.model).__name__}: {_count(num)} parameters in {'/'.join(dtypes) or 'no dtype'}, "
        f"inputs {shapes or 'none'}, {optimizer}{accumulated}"
    )


def _count(num: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if num >= size:
            return f"{num / size:.2f}{unit}"
    return str(num)


# Files


def _from_json(text: str, path: Path, options: Options) -> Target:
    if not path.is_file():
        raise TargetError(f"no file {path}")
    try:
        data = json.loads(path.read_text())
    except (ValueError, OSError) as e:
        raise TargetError(f"{path} can't be read as JSON: {e}") from e
    if isinstance(data, dict) and str(data.get("format", "")).startswith("memopt."):
        if options.given():
            names = ", ".join(f"--{name.replace('_', '-')}" for name in options.given())
            raise TargetError(f"{path} is a finished profile: {names} would need the workload itself")
        profile = _profile_in(path, data)
        return Target(name=text, about=f"{profile.model}, saved profile", profile=profile)
    if not isinstance(data, dict) or not ({"model_type", "architectures"} & set(data)):
        raise TargetError(f"{path} is neither a transformers config nor a profile that memopt saved")
    if "model_type" not in data:
        raise TargetError(f"{path} names no model_type: transformers can't tell its config class")

    model = model_of_config(path, options.dtype)

    def build(batch: int | None) -> Workload:
        made = workload_of_pretrained(model, replace(options, batch=batch))
        choice = options.optimizer or OptimizerChoice.ADAMW
        return replace(made, optimizer=choice.over(model), micro_batches=options.micro_batches or 1)

    workload = build(options.batch)
    return Target(
        name=text,
        about=_about(workload),
        workload=workload,
        rebatched=build,
        batch=options.batch or 1,
    )


def _profile_in(path: Path, data: dict[str, Any]) -> Profile:
    try:
        return Profile.from_json(data)
    except (KeyError, TypeError, IndexError, AttributeError) as e:
        raise TargetError(f"{path} is a damaged profile: {type(e).__name__}: {e}") from e
    except ValueError as e:
        raise TargetError(f"{path}: {e}") from e


# Models of transformers


def model_of_config(path: Path, dtype: DtypeChoice | None) -> nn.Module:
    """The model that a config.json describes, on the meta device and in training mode.

    Raises UnsupportedError where transformers is missing or knows no such model.
    """
    try:
        import transformers
    except ImportError as e:
        raise UnsupportedError(f"{path}", "a config.json needs transformers: pip install transformers") from e
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
    except Exception as e:
        raise TargetError(
            f"{path} is not a config that transformers {transformers.__version__} reads: {_line(e)}"
        ) from e
    name = next(iter(getattr(config, "architectures", None) or ()), None)
    model_class = getattr(transformers, name, None) if name else _usual_class(transformers, config)
    if model_class is None:
        raise UnsupportedError(name or config.model_type, f"transformers {transformers.__version__} has no such model")
    if getattr(config, "use_cache", False):
        config.use_cache = False  # as its Trainer does: a cache is for generation
    wanted = dtype.value if dtype is not None else _name_of(getattr(config, "dtype", None))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(getattr(torch, wanted or "float32"))
        with torch.device("meta"):
            model: nn.Module = model_class(config)
    except Exception as e:
        raise UnsupportedError(model_class.__name__, f"it can't be built from {path}: {_line(e)}") from e
    finally:
        torch.set_default_dtype(before)
    return model.train()


def _name_of(dtype: Any) -> str | None:
    return str(dtype).removeprefix("torch.") if dtype is not None else None


def _usual_class(transformers: ModuleType, config: Any) -> Any:
    for auto in (
        "AutoModelForCausalLM",
        "AutoModelForSeq2SeqLM",
        "AutoModelForMaskedLM",
        "AutoModelForImageClassification",
    ):
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            return mapping[type(config)]
    return None


def _line(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0] if lines else ''}"[:300]


def workload_of_pretrained(model: nn.Module, options: Options) -> Workload:
    """A batch of zeros with labels, shaped for a transformers model: text, images, or text to text.

    Raises UnsupportedError for a model whose inputs or labels are not known here, TargetError for other sizes.
    """
    name = type(model).__name__
    config: Any = model.config
    takes = _parameters_of(model.forward)
    main = str(getattr(model, "main_input_name", "input_ids"))
    needs_images = main != "pixel_values" and "pixel_values" in takes
    if "labels" not in takes:
        raise UnsupportedError(name, f"its forward takes no labels, so the loss is not known; {_WRITE_A_FACTORY}")
    if needs_images or main not in ("input_ids", "pixel_values"):
        raise UnsupportedError(name, f"it takes more than text or images alone; {_WRITE_A_FACTORY}")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = options.batch or 1

    def ids(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.long, device=device)

    if main == "pixel_values":
        if options.seq is not None:
            raise TargetError(f"{name} takes images: it has no --seq")
        if not name.endswith("ForImageClassification"):
            raise UnsupportedError(name, f"what its labels are is not known; {_WRITE_A_FACTORY}")
        size = getattr(config, "image_size", None) or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        pixels = torch.zeros(batch, getattr(config, "num_channels", 3), height, width, dtype=dtype, device=device)
        return Workload(model, kwargs={"pixel_values": pixels, "labels": ids(batch)})

    seq = _seq_of(name, config, options.seq)
    labels_by_suffix = {
        ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration"): (
            batch,
            seq,
        ),
        ("ForSequenceClassification",): (batch,),
    }
    shape = next((s for suffixes, s in labels_by_suffix.items() if name.endswith(suffixes)), None)
    if shape is None:
        raise UnsupportedError(name, f"what its labels are is not known; {_WRITE_A_FACTORY}")
    if name.endswith("ForSequenceClassification") and getattr(config, "pad_token_id", None) is None and batch > 1:
        config.pad_token_id = 0  # such models refuse batches without one
    return Workload(model, kwargs={"input_ids": ids(batch, seq), "labels": ids(*shape)})


_WRITE_A_FACTORY = "write a factory that returns memopt.Workload(model, kwargs=..., loss=..., optimizer=...)"
_USUAL_SEQ = 2048


def _seq_of(name: str, config: Any, asked: int | None) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if asked is not None and most is not None and asked > most:
        raise TargetError(f"--seq {asked}: {name} has positions for {most}")
    if asked is not None:
        return asked
    return min(most, _USUAL_SEQ) if most is not None else _USUAL_SEQ

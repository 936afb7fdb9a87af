"""Which target is meant and what it is, without loading weights or importing torch ourselves.

`--target` is a local folder, a folder with (or the path of) one GGUF file, or a Hub id. Everything about the model
that a store must agree on is in `target_identity`. Weights are loaded by shared/target.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from shared.errors import TargetNotFound, TargetUnsupported

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_READ_BYTES = 8 << 20
# What tokenizers disagree on in practice: digits, spaces, newlines, code, scripts, joined emoji, combining marks.
_PROBE = (
    "Hello world  1234567890 3.14\n\n\tdef f(x): return x**2 # \u00e9e\u0301 "
    "\u6f22\u5b57 \u0440\u0443\u0441 \U0001f469\u200d\U0001f469\u200d\U0001f467 isn't"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFiles:
    """Where a target lies: kind is "folder", "gguf" or "hub" (then `revision` is the resolved commit)."""

    name: str
    kind: str
    folder: Path
    gguf: str | None = None
    revision: str | None = None

    def where(self) -> dict[str, Any]:
        """Keyword arguments for transformers' from_pretrained."""
        found: dict[str, Any] = {"pretrained_model_name_or_path": str(self.folder)}
        return found | ({"gguf_file": self.gguf} if self.gguf else {})


def find_target(target: str, *, weights: bool = False) -> TargetFiles:
    """Resolve what the user wrote; for a Hub id, `weights` also downloads them. Raises TargetNotFound."""
    path = Path(target).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _as_gguf(path)
    if path.is_dir():
        return _find_in_folder(path)
    if path.exists() or path.is_absolute() or not _HUB_ID.fullmatch(target):
        raise TargetNotFound(f"target {target} is neither a folder, a .gguf file nor a Hub id")
    return _find_on_hub(target, weights)


def _find_in_folder(path: Path) -> TargetFiles:
    name = path.resolve().name
    if (path / "config.json").is_file():
        return TargetFiles(name=name, kind="folder", folder=path)
    ggufs = sorted(entry.name for entry in path.glob("*.gguf"))
    if not ggufs:
        raise TargetNotFound(f"folder {path} has neither config.json nor a .gguf file; pass the model's own folder")
    if len(ggufs) > 1:
        raise TargetNotFound(f"folder {path} has {len(ggufs)} .gguf files ({', '.join(ggufs)}); pass the path of one")
    return _as_gguf(path / ggufs[0])


def _as_gguf(path: Path) -> TargetFiles:
    for package in ("gguf", "accelerate"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError as error:
            raise TargetUnsupported(
                f"target {path} is a GGUF file and the package {package} is not installed; "
                "pip install 'dflash-offline[gguf]'"
            ) from error
    return TargetFiles(name=path.stem, kind="gguf", folder=path.parent, gguf=path.name)


def _find_on_hub(target: str, weights: bool) -> TargetFiles:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_TEXT_FILES, "*.safetensors"] if weights else _TEXT_FILES
    try:
        folder = Path(snapshot_download(target, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TargetNotFound(f"target {target}: no such folder here, and the Hub did not give it ({first})") from error
    if not (folder / "config.json").is_file():
        raise TargetNotFound(
            f"target {target}: the Hub repository has no config.json; GGUF repositories must be downloaded first"
        )
    return TargetFiles(name=target, kind="hub", folder=folder, revision=folder.name)


def load_config(files: TargetFiles) -> Any:
    """The target's transformers config. Raises TargetUnsupported for an architecture this version does not know."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(**files.where())
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise TargetUnsupported(
            f"config of target {files.name} cannot be used by this transformers: {_first_line(error)}"
        ) from error
    except OSError as error:
        raise TargetNotFound(f"config of target {files.name} cannot be read: {_first_line(error)}") from error


def load_tokenizer(target: str) -> Any:
    """The target's tokenizer. Raises TargetNotFound when it has none."""
    return load_tokenizer_of(find_target(target))


def load_tokenizer_of(files: TargetFiles) -> Any:
    """The tokenizer beside the target's files, for GGUF with what its conversion loses put back."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(**files.where())
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        raise TargetNotFound(f"target {files.name} has no usable tokenizer: {_first_line(error)}") from error
    if not tokenizer(_PROBE, add_special_tokens=False)["input_ids"]:
        # Without its files transformers builds a tokenizer that knows no word and says nothing.
        raise TargetNotFound(
            f"target {files.name} has no usable tokenizer: the one in {files.folder} knows {len(tokenizer)} tokens and "
            "turns text into none; add tokenizer.json"
        )
    if files.gguf:
        from shared.target_gguf import restore_tokenizer

        restore_tokenizer(tokenizer, files.folder / files.gguf)
    return tokenizer


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def tokenizer_identity(tokenizer: Any) -> dict[str, str]:
    """tokenizer_sha256 and chat_template_sha256.

    The first is over behaviour (vocabulary, special ids, the ids of a probe text), so that the same tokenizer kept in
    other files, or written by another version, is the same.
    """
    special = {
        name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items()) if isinstance(token, str)
    }
    behaviour = [
        sorted(tokenizer.get_vocab().items()),
        special,
        tokenizer(_PROBE, add_special_tokens=False)["input_ids"],
    ]
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return {"tokenizer_sha256": _sha_of(behaviour), "chat_template_sha256": hashlib.sha256(text.encode()).hexdigest()}


def _sha_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def target_identity(target: str) -> dict[str, Any]:
    """What a store must agree on about its target: hashes, geometry, and how embeddings and logits are scaled.

    Keys: name, kind, revision, architecture, weights_sha256 (or "revision:<commit>" for a Hub id), config_sha256,
    tokenizer_sha256, chat_template_sha256, num_hidden_layers, hidden_size, vocab_size, tie_word_embeddings,
    input_embedding_scale, output_multiplier, final_logit_softcapping. Raises TargetNotFound, TargetUnsupported.
    """
    files = find_target(target)
    config = load_config(files)
    return {
        "name": files.name,
        "kind": files.kind,
        "revision": files.revision,
        "architecture": (config.architectures or [type(config).__name__])[0],
        "weights_sha256": weights_sha256(files),
        "config_sha256": _config_sha256(files),
        **tokenizer_identity(load_tokenizer_of(files)),
        **geometry_of(config),
    }


def _config_sha256(files: TargetFiles) -> str:
    """Hash of config.json as written: transformers' own defaults change between versions."""
    if files.gguf:
        return "in the weights file"
    volatile = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
    plain = json.loads((files.folder / "config.json").read_text(encoding="utf-8"))
    return _sha_of({key: value for key, value in plain.items() if key not in volatile})


def geometry_of(config: Any) -> dict[str, Any]:
    """Sizes and scales of the text model in a config (multimodal configs keep it nested).

    The scales are the ones transformers applies outside the decoder layers; shared/target.py checks them by a forward.
    """
    text = config.get_text_config()
    model_type = str(text.model_type)
    scale = getattr(text, "embedding_multiplier", None) or getattr(text, "scale_emb", None)
    if scale is None:
        scale = text.hidden_size**0.5 if model_type.startswith("gemma") else 1.0
    multiplier = getattr(text, "output_multiplier", None) or getattr(text, "logit_scale", None)
    if multiplier is None and getattr(text, "logits_scaling", None):
        multiplier = 1.0 / text.logits_scaling
    softcap = getattr(text, "final_logit_softcapping", None)
    return {
        "num_hidden_layers": int(text.num_hidden_layers),
        "hidden_size": int(text.hidden_size),
        "vocab_size": int(text.vocab_size),
        "tie_word_embeddings": bool(getattr(text, "tie_word_embeddings", False)),
        "input_embedding_scale": float(scale),
        "output_multiplier": float(multiplier or 1.0),
        "final_logit_softcapping": None if softcap is None else float(softcap),
    }


def weights_sha256(files: TargetFiles) -> str:
    """sha256 over the weight files' names and contents, read in parallel; a Hub commit already fixes them."""
    if files.kind == "hub":
        return f"revision:{files.revision}"
    paths = [files.folder / files.gguf] if files.gguf else sorted(files.folder.glob("*.safetensors"))
    paths = paths or sorted(files.folder.glob("*.bin"))
    if not paths:
        raise TargetNotFound(f"target {files.name}: no .safetensors or .bin file in {files.folder}")
    for path in paths:
        if path.suffix == ".safetensors":
            _require_whole(path, files.name)
    with ThreadPoolExecutor(max_workers=8) as pool:
        sums = list(pool.map(_file_sha256, paths))
    return _sha_of([[path.name, digest] for path, digest in zip(paths, sums, strict=True)])


def _require_whole(path: Path, name: str) -> None:
    """Refuse a safetensors file that is cut (a download that broke off) before anything is built on it."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            tensors = json.loads(file.read(header)) if header <= size else {}
        wanted = 8 + header + max(t["data_offsets"][1] for key, t in tensors.items() if key != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetNotFound(
            f"target {name}: {path} ({size:,} bytes) is no whole safetensors file; get it again"
        ) from error
    if size != wanted:
        raise TargetNotFound(f"target {name}: {path} has {size:,} bytes, its header says {wanted:,}; get it again")


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()

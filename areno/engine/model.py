"""Where a policy comes from: check the checkpoint, load tokenizer and weights, settle device, dtype and end tokens."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.config import BasicConfig, TrainConfig
from areno.errors import UsageError
from areno.hub import hub_reachable

if TYPE_CHECKING:
    import torch

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Policy:
    """A causal language model that is sampled from and trained.

    end_token_ids: a completion ends at any of them. pad_token_id: fills rows to equal length; may be an end token,
    since no mask is ever made by comparing ids.
    """

    model: Any
    tokenizer: Any
    end_token_ids: tuple[int, ...]
    pad_token_id: int
    device: torch.device
    dtype: torch.dtype


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU.

    Raises:
        UsageError: CUDA was asked for and torch sees none.
    """
    import torch

    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise UsageError(
            "--device cuda: torch sees no CUDA device; use --device cpu, or install a CUDA build of torch."
        )
    return torch.device("cuda" if found and name != "cpu" else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a CUDA device that computes in it, else float32."""
    import torch

    if name == "auto":
        name = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def check_checkpoint(ckpt: str) -> None:
    """Look at the files of a local checkpoint, or ask the hub whether it has that model. Loads no weights, no torch.

    Raises:
        UsageError: it cannot be loaded; the message names what is missing and the way out.
    """
    folder = Path(ckpt).expanduser()
    if folder.is_dir():
        _check_folder(folder)
    elif folder.exists():
        raise UsageError(f"--ckpt {ckpt} is a file: give the folder that holds config.json and the weights.")
    elif _HUB_NAME.fullmatch(ckpt) and not ckpt.startswith("."):
        _check_hub_name(ckpt)
    else:
        raise UsageError(f"--ckpt {ckpt}: there is no such folder, and it is no hub name (OWNER/NAME) either.")


def _check_folder(folder: Path) -> None:
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise UsageError(f"--ckpt {folder} is no checkpoint: it holds no config.json; save one with save_pretrained().")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{config_file} is not valid JSON ({error}): copy the checkpoint again.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise UsageError(f"{config_file} names no model_type: it is not the configuration of a transformers model.")
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise UsageError(f"--ckpt {folder} holds no weights (*.safetensors or pytorch_model*.bin): copy them there.")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UsageError(f"--ckpt {folder} holds no tokenizer (tokenizer.json): save one there with save_pretrained().")


def _check_hub_name(name: str) -> None:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    missing = f"--ckpt {name}: there is no such folder here, and"
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        if not hub_reachable():
            raise UsageError(
                f"{missing} the model hub cannot be reached: give a local checkpoint folder, "
                "or download the model once where there is a network."
            )
        HfApi().model_info(name, timeout=10)
    except HFValidationError as error:
        raise UsageError(f"{missing} it is no hub name (OWNER/NAME) either.") from error
    except GatedRepoError as error:
        raise UsageError(f"--ckpt {name} is gated: accept its terms on the hub, then run `hf auth login`.") from error
    except RepositoryNotFoundError as error:
        raise UsageError(f"{missing} the hub has no model of that name: check the spelling.") from error
    except HfHubHTTPError as error:
        raise UsageError(f"{missing} the hub does not hand it out ({_first_line(error)}).") from error


def load_tokenizer(ckpt: str) -> Any:
    """The checkpoint's tokenizer (a transformers `PreTrainedTokenizerBase`).

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(ckpt)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"--ckpt {ckpt}: its tokenizer cannot be loaded ({_first_line(error)}).") from error


def load_policy(basic: BasicConfig, train: TrainConfig, tokenizer: Any) -> Policy:
    """Load the weights and make the model ready to sample and to train.

    Raises:
        UsageError: the device or the attention back end is not there, or the checkpoint does not fit its own
            configuration or the tokenizer.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    device = resolve_device(basic.device)
    dtype = resolve_dtype(basic.dtype, device)
    attention = _attention(train.attn_backend, device)
    loader: Any = AutoModelForCausalLM
    try:
        model, report = loader.from_pretrained(
            basic.ckpt, dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"--ckpt {basic.ckpt}: the model cannot be loaded ({_first_line(error)}).") from error
    missing = report["missing_keys"]
    if missing:
        # transformers fills these with random numbers and only warns.
        raise UsageError(
            f"--ckpt {basic.ckpt} lacks {len(missing)} weights, {min(missing)} among them: copy the checkpoint again."
        )
    return policy_of(model.to(device), tokenizer, activation_checkpointing=train.activation_checkpointing)


def policy_of(model: Any, tokenizer: Any, *, activation_checkpointing: bool = False) -> Policy:
    """A policy around a model that is already in memory, on its device.

    Raises:
        UsageError: the tokenizer has ids that the model has no embedding for.
    """
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise UsageError(f"The tokenizer has {len(tokenizer)} tokens, the model {rows}: they do not belong together.")
    from areno.engine.attention import use_row_attention

    _turn_off_dropout(model)
    use_row_attention(model)
    if activation_checkpointing:
        # The name since transformers 5.2x, or the one before.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model.train()
    ends = end_token_ids(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends[0] if ends else 0)
    return Policy(model, tokenizer, ends, int(pad), model.device, model.dtype)


def end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every end token of the generation configuration, then the tokenizer's own, each once."""
    declared = model.generation_config.eos_token_id
    ids = [*(declared if isinstance(declared, (list, tuple)) else [declared]), tokenizer.eos_token_id]
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def _attention(backend: str, device: torch.device) -> str:
    if backend == "native":
        return "sdpa"
    if device.type != "cuda":
        raise UsageError("--attn-backend flash needs a CUDA device: use --attn-backend native.")
    if importlib.util.find_spec("flash_attn") is None:
        raise UsageError(
            "--attn-backend flash: the package flash-attn is not installed; "
            "`pip install flash-attn --no-build-isolation`, or use --attn-backend native."
        )
    return "flash_attention_2"


def _turn_off_dropout(model: Any) -> None:
    """Rollout and training must see the same distribution; dropout would make the train logprobs a random other one."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

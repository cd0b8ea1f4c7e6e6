"""The chat template and the special tokens of a tokenizer, from its files, as transformers reads them.

    chat_template.jinja, additional_chat_templates/NAME.jinja      else `chat_template` of tokenizer_config.json
    special_tokens_map.json, unless tokenizer_config.json          else tokenizer_config.json, else the defaults of the
    has `added_tokens_decoder`                                     tokenizer's class, which transformers is asked for

Without importing transformers, which takes seconds and is not installed in every service. Only for a template that uses
a token that no file has, it is imported.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bapo.core.errors import ConfigError

TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"
CONFIG_FILE, MAP_FILE = "tokenizer_config.json", "special_tokens_map.json"
DEFAULT, TOOL_USE = "default", "tool_use"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CLASSES_WITHOUT_DEFAULTS = frozenset({"PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend"})


class TokenizerFiles:
    """Text files of a folder or Hub id. Raises: ConfigError if they cannot be read."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = tokenizer
        self._config = self._json(CONFIG_FILE)

    def template(self, *, with_tools: bool) -> str | None:
        """Source of the chat template; None if there is none.

        Args:
            with_tools: choose the template for tools, if there is one.
        Raises: ConfigError if there are only templates with other names.
        """
        named = self._named_templates()
        if with_tools and TOOL_USE in named:
            return named[TOOL_USE]
        if named and DEFAULT not in named:
            raise ConfigError(
                f"the chat templates of {self._tokenizer} are {', '.join(sorted(named))}, and none is {DEFAULT!r}; "
                f"copy one to {TEMPLATE_FILE}, or set task.options.message_format"
            )
        return named.get(DEFAULT)

    def special_tokens(self, used: Iterable[str]) -> dict[str, str]:
        """Name -> token, as variables of a template.

        Args:
            used: names that the template uses.
        Raises: ConfigError for a default of the tokenizer's class if transformers cannot be asked.
        """
        values = dict(self._config)
        if "added_tokens_decoder" not in values:
            values |= self._json(MAP_FILE)
        names = {*SPECIAL_TOKENS, *(name for name, value in values.items() if _is_named_token(name, value))}
        found = {name: _content(values[name]) for name in names if values.get(name) is not None}
        if isinstance(extra := values.get("extra_special_tokens"), Mapping):
            found |= {name: _content(token) for name, token in extra.items()}
        unknown = sorted(name for name in used if name in SPECIAL_TOKENS and name not in values)
        return found | ({name: token for name, token in self._defaults(unknown).items() if name in unknown})

    def _defaults(self, unknown: list[str]) -> Mapping[str, str]:
        """Special tokens of the tokenizer that transformers makes of the files."""
        if not unknown:
            return {}
        try:
            transformers: Any = importlib.import_module("transformers")
            special: Mapping[str, str] = transformers.AutoTokenizer.from_pretrained(self._tokenizer).special_tokens_map
        except Exception as error:  # also what a tokenizer's own class raises
            if isinstance(error, ImportError) and self._config.get("tokenizer_class") in CLASSES_WITHOUT_DEFAULTS:
                return {}
            raise ConfigError(
                f"the chat template of {self._tokenizer} uses {', '.join(unknown)}, which neither {CONFIG_FILE} nor "
                f"{MAP_FILE} defines, and transformers cannot be asked for the default of the tokenizer's class: "
                f"{str(error).partition(chr(10))[0]}. Write it to {CONFIG_FILE} (null: none)"
            ) from error
        return special

    def _named_templates(self) -> dict[str, str]:
        """Name -> source. Templates in files replace those of the config."""
        own = self._read(TEMPLATE_FILE)
        found = {} if own is None else {DEFAULT: own}
        for path in sorted((Path(self._tokenizer) / NAMED_TEMPLATES).glob("*.jinja")):
            found[path.stem] = path.read_text(encoding="utf-8")
        given = self._config.get("chat_template")
        if found or given is None:
            return found
        if isinstance(given, str):
            return {DEFAULT: given}
        try:
            return dict(given) if isinstance(given, Mapping) else {one["name"]: one["template"] for one in given}
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"chat_template in {CONFIG_FILE} of {self._tokenizer} is neither a template nor a list of named ones"
            ) from error

    def _json(self, name: str) -> dict[str, Any]:
        """Empty if there is no such file."""
        try:
            found = json.loads(self._read(name) or "{}")
        except ValueError as error:
            raise ConfigError(f"{name} of {self._tokenizer} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{name} of {self._tokenizer} is not a JSON object")
        return found

    def _read(self, name: str) -> str | None:
        """None if there is no such file."""
        folder = Path(self._tokenizer)
        if folder.is_dir():
            path = folder / name
            return path.read_text(encoding="utf-8") if path.is_file() else None
        try:
            hub = importlib.import_module("huggingface_hub")
        except ImportError as error:
            raise ConfigError(f"{self._tokenizer!r} is not a folder, and a Hub id requires huggingface_hub") from error
        return self._downloaded(hub.hf_hub_download, hub.errors, name)

    def _downloaded(self, download: Callable[[str, str], str], errors: Any, name: str) -> str | None:
        try:
            return Path(download(self._tokenizer, name)).read_text(encoding="utf-8")
        except errors.LocalEntryNotFoundError as error:
            if name != CONFIG_FILE:  # offline, and not among the files that were fetched: many models have none
                return None
            raise self._unreadable(name, error) from error
        except errors.EntryNotFoundError:
            return None
        except (
            Exception
        ) as error:  # the Hub's client raises errors of its own and those of whatever HTTP library it has
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: Exception) -> ConfigError:
        return ConfigError(
            f"model.path: cannot read {name} of {self._tokenizer!r}, which defines its chat template: "
            f"{str(error).partition(chr(10))[0]}. Set task.options.message_format to format conversations without it"
        )


def _is_named_token(name: str, value: Any) -> bool:
    """Whether transformers gives a key of tokenizer_config.json to templates, such as `image_token`."""
    return name.endswith("_token") and isinstance(value, str)


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)

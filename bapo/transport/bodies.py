"""Bodies of an API that are messages of `bapo.core`, read and described by their definition there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic_core import CoreSchema, core_schema

from bapo.core.errors import ContractError
from bapo.core.json_values import from_map, to_map

DEFINITIONS = "#/$defs/"


@dataclass(frozen=True)
class Message:
    """Has FastAPI read, write and describe a msgspec struct: `Annotated[Progress, Message()]`."""

    read: Callable[[Any], Any] | None = None
    """Makes the message of JSON values; None: as its definition says. Raises: ContractError."""

    def __get_pydantic_core_schema__(self, kind: Any, _: object) -> CoreSchema:
        def validated(values: Any) -> Any:
            try:
                return values if isinstance(values, kind) else (self.read or _reader(kind))(values)
            except ContractError as error:
                raise ValueError(str(error)) from error

        return core_schema.no_info_plain_validator_function(
            validated,
            serialization=core_schema.plain_serializer_function_ser_schema(to_map),
            metadata={"pydantic_js_functions": [lambda *_: json_schema(kind)]},
        )


def _reader(kind: Any) -> Callable[[Any], Any]:
    return lambda values: from_map(values, kind, kind.__name__)


def json_schema(kind: Any) -> dict[str, Any]:
    """The JSON schema of a struct, without references: it may be put anywhere into another one."""
    found = msgspec.json.schema(kind, ref_template=DEFINITIONS + "{name}")
    definitions = found.pop("$defs")

    def inlined(part: Any) -> Any:
        if isinstance(part, list | tuple):
            return [inlined(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return inlined(definitions[part["$ref"].removeprefix(DEFINITIONS)])
        return {key: inlined(item) for key, item in part.items()}

    schema: dict[str, Any] = inlined(found)
    return schema

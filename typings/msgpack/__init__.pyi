"""The part of msgpack that Umbra uses; msgpack itself ships no types."""

from collections.abc import Callable
from typing import Any

from msgpack.exceptions import ExtraData as ExtraData
from msgpack.exceptions import FormatError as FormatError
from msgpack.exceptions import OutOfData as OutOfData
from msgpack.exceptions import StackError as StackError
from msgpack.exceptions import UnpackException as UnpackException
from msgpack.exceptions import UnpackValueError as UnpackValueError

class ExtType(tuple[int, bytes]):
    code: int
    data: bytes
    def __new__(cls, code: int, data: bytes) -> ExtType: ...

def packb(
    o: object,
    *,
    default: Callable[[Any], object] | None = None,
    use_single_float: bool = False,
    autoreset: bool = True,
    use_bin_type: bool = True,
    strict_types: bool = False,
    datetime: bool = False,
    unicode_errors: str | None = None,
) -> bytes: ...
def unpackb(
    packed: bytes | bytearray | memoryview,
    *,
    raw: bool = False,
    use_list: bool = True,
    strict_map_key: bool = True,
    object_hook: Callable[[dict[Any, Any]], object] | None = None,
    object_pairs_hook: Callable[[list[tuple[Any, Any]]], object] | None = None,
    list_hook: Callable[[list[Any]], object] | None = None,
    ext_hook: Callable[[int, bytes], object] = ...,
    timestamp: int = 0,
    unicode_errors: str | None = None,
    max_str_len: int = -1,
    max_bin_len: int = -1,
    max_array_len: int = -1,
    max_map_len: int = -1,
    max_ext_len: int = -1,
) -> Any: ...

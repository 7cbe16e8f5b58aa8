import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

class AsyncLLM:
    engine_core: Any
    output_processor: Any
    output_handler: asyncio.Task[None] | None
    vllm_config: Any
    @property
    def errored(self) -> bool: ...
    @classmethod
    def from_engine_args(
        cls, engine_args: AsyncEngineArgs, *, stat_loggers: list[Any] | None = None
    ) -> AsyncLLM: ...
    def generate(
        self,
        prompt: Mapping[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]: ...
    async def abort(self, request_id: str | Iterable[str]) -> None: ...
    async def get_supported_tasks(self) -> tuple[str, ...]: ...
    async def resume_generation(self) -> None: ...
    async def init_weight_transfer_engine(self, request: WeightTransferInitRequest) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, request: WeightTransferUpdateRequest) -> None: ...
    async def finish_weight_update(self, weight_version: str | None = None) -> None: ...
    async def update_weight_version(self, new_version: str) -> None: ...
    def shutdown(self, timeout: float | None = None) -> None: ...

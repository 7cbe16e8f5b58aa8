from typing import Any

class WeightVersionSpan:
    version: str
    start: int
    end: int

class CompletionOutput:
    token_ids: list[int]
    logprobs: Any
    finish_reason: str | None
    routed_experts: Any
    weight_versions: list[WeightVersionSpan] | None

class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]
    finished: bool

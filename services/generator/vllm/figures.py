"""What vLLM's scheduler says of its cache of keys and values, step by step."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from umbra.services.generator.engines.engine import CacheFigures


class CacheLog(PrometheusStatLogger):
    """Adds up vLLM's figures of each step; `figures` can be read from any thread.

    It is one of vLLM's loggers for Prometheus by name only: else vLLM would make that as well,
    which takes time in every step for what nobody asks.
    """

    def __init__(self) -> None:
        self.figures = CacheFigures()

    def __call__(self, vllm_config: Any, engine_index: int) -> CacheLog:
        """The log of an engine core, of which there is one."""
        del vllm_config, engine_index
        return self

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """A step was made."""
        before = self.figures
        usage, asked, cached = before.usage, before.asked_tokens, before.cached_tokens
        if scheduler_stats is not None:
            usage = scheduler_stats.kv_cache_usage
            asked += scheduler_stats.prefix_cache_stats.queries
            cached += scheduler_stats.prefix_cache_stats.hits
        preempted = iteration_stats.num_preempted_reqs if iteration_stats is not None else 0
        self.figures = CacheFigures(usage, asked, cached, before.preemptions + preempted)

    def log_engine_initialized(self) -> None:
        pass

    def log(self) -> None:
        pass

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        pass

    def record_admission_rejection(self, reason: str) -> None:
        pass

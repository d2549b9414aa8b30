"""Our tier, writing down every call that vLLM makes of it and what it answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, RequestOffloadingContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from asynchicache.integrations.vllm.tier import AsynchicacheTier


class RecordingTier(AsynchicacheTier):
    """
    Attributes:
        calls: each a method's name, its arguments, and its answer, as JSON has them.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: list[dict[str, Any]] = []

    def _note(self, call: str, **what: Any) -> None:
        self.calls.append({"call": call, **what})

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        answer = super().lookup(key, req_context)
        self._note("lookup", key=key.hex(), request=req_context.req_id, answer=answer.name)
        return answer

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._note("on_new_request", request=req_context.req_id, parameters=req_context.kv_transfer_params)
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._note("on_request_finished", request=req_context.req_id)
        super().on_request_finished(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._note("on_schedule_end")
        super().on_schedule_end(context)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._note("submit_store", **_job(job_metadata))
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._note("submit_load", **_job(job_metadata))
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        if results:
            ended = sorted((result.job_id, result.success, result.transfer_bytes) for result in results)
            self._note("get_finished_jobs", answer=[list(one) for one in ended])
        return results

    def drain_jobs(self) -> None:
        self._note("drain_jobs")
        super().drain_jobs()


def _job(job: TransferJob) -> dict[str, Any]:
    return {
        "job": job.job_id,
        "request": job.req_context.req_id,
        "keys": [key.hex() for key in job.keys],
        "rows": job.chunk_ids.tolist(),
        "promotion": job.is_promotion,
    }

"""How much host memory does a workload want? Replays of one trace with more and more of it."""

from pathlib import Path

from asynchicache.replay.options import ReplayOptions
from asynchicache.replay.report import ReplayReport
from asynchicache.replay.run import run_replay

TRACE = Path(__file__).parents[2] / "tests/data/traces/claude_code_weka_16_sessions.jsonl.gz"
PAGE, STATE = 1_572_864 + 4096, 77_856_768 + 4096  # bytes of a host slot, see sizes.py


def replay(**options: str) -> ReplayReport:
    return run_replay(ReplayOptions(str(TRACE), pools="kv,mamba", **options), lambda done, total: None)


def gib(report: ReplayReport) -> float:
    pages, states = (report.slots[pool]["host"] for pool in ("kv", "mamba"))
    return (pages * PAGE + states * STATE) / 2**30


print("host share    GiB  hit rate  of it from the host")
for share in ("0", "0.2", "0.35", "0.4", "0.5", "1"):
    report = replay(capacity_share="0.3", host_share=share)
    host = report.hit_rate_by_tier["host"]
    print(f"{share:>10} {gib(report):6.1f}  {report.hit_rate:8.2%}  {host:19.2%}")

print("checkpoints             states  hit rate")
for checkpoint in ("none", "prompt", "branch", "prompt+branch", "prompt+branch+8192"):
    report = replay(checkpoint=checkpoint)
    print(f"{checkpoint:20} {report.states_kept:9,}  {report.hit_rate:8.2%}")

print("few state slots")
few = replay(capacity_share="kv=1,mamba=0.05")
for pool, reasons in few.misses.items():
    for reason, tokens in reasons.items():
        print(f"{tokens / few.prompt_tokens:7.2%} of the prompts: {pool} {reason}")

"""How far `titanlite plan` is off: real steps on a CPU beside their plans, memory and time.

    python benchmarks/planner.py [--only TEXT] [--bytes | --rounds N] [--out benchmarks/planner.md]

Each case builds its job as a training run does, on 1, 2 or 4 processes, and does steps over random rows. On one process
the bytes of a step are those that torch's profiler sees in the allocator, so they do not come from the planner's own
counter. It does not see what gloo's threads free, so on several processes a dispatch counter counts storages. The time
is the median of steps without the profiler.

Each round measures the rates of this machine, as `titanlite plan --measure` does, and then does the steps of all cases.
Figures of time are medians of the rounds, because the same step can take a fifth more or less some minutes later.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from runs import RESULTS, table

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.batch import Microbatch
from titanlite.observe.counter import Counter
from titanlite.observe.gpus import Gpu
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.plan.forecast import forecast, traces_of
from titanlite.plan.measure import measure, this_cpu
from titanlite.plan.trace import trace_run
from titanlite.runtime.world import process_group
from titanlite.train.step import TrainStep

MIB = 2**20
PAGE = Path(__file__).with_suffix(".md")
LEAST_SECONDS, LEAST_STEPS = 3.0, 7  # of the steps that are timed
Sections = Mapping[str, Mapping[str, Any]]

SMALL = {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 768, "vocab_size": 4096}
MEDIUM = {"dim": 512, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 1536, "vocab_size": 8192}
LARGE = {"dim": 768, "n_layers": 8, "n_heads": 12, "n_kv_heads": 4, "ffn_dim": 2048, "vocab_size": 16384}
ROWS = {"seq_len": 256, "local_batch_size": 4}
LONG = {"seq_len": 1024, "local_batch_size": 1}
EACH_BLOCK = {"fsdp_min_num_params": 0}  # a group of FSDP for each block, as large models have


def _job(model: Mapping[str, Any], rows: Mapping[str, Any], mode: str = "none", **more: Any) -> Sections:
    recompute = {"mode": mode, "selective_ac_option": "op"}
    training = {**rows, **more.pop("training", {})}
    return {"model": model, "training": training, "activation_checkpoint": recompute, **more}


def _pipeline(schedule: str, microbatches: int) -> dict[str, Any]:
    layout = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule, **EACH_BLOCK}
    rows = {"local_batch_size": 1, "global_batch_size": microbatches}
    return {"training": rows, "parallelism": layout}


FLOAT8 = {"enable": True, "emulate": True, "min_features": 0}
GATHERED_FP8 = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
CASES: dict[str, tuple[int, Sections]] = {
    "small": (1, _job(SMALL, ROWS)),
    "small, selective": (1, _job(SMALL, ROWS, "selective")),
    "small, full": (1, _job(SMALL, ROWS, "full")),
    "small, fp32": (1, _job(SMALL, ROWS, training={"mixed_precision_param": "float32"})),
    "small, 4 microbatches": (1, _job(SMALL, ROWS, training={"global_batch_size": 16})),
    "medium, selective": (1, _job(MEDIUM, LONG, "selective")),
    "medium, masks": (1, _job(MEDIUM, LONG, "full", dataset={"document_mask": True})),
    "medium, bf16 state": (
        1,
        _job(MEDIUM, ROWS, training={"dtype": "bfloat16"}, optimizer={"stochastic_rounding": True}),
    ),
    "large, full": (1, _job(LARGE, LONG, "full")),
    "large": (1, _job(LARGE, ROWS)),
    "small, FSDP": (2, _job(SMALL, ROWS)),
    "medium, FSDP, selective": (2, _job(MEDIUM, ROWS, "selective", parallelism=EACH_BLOCK)),
    "large, FSDP, full": (2, _job(LARGE, ROWS, "full")),
    "medium, FSDP, offload": (2, _job(MEDIUM, ROWS, "full", training={"enable_cpu_offload": True})),
    "medium, tensor": (2, _job(MEDIUM, ROWS, parallelism={"tensor_parallel_degree": 2})),
    "medium, context": (2, _job(MEDIUM, LONG, "selective", parallelism={"context_parallel_degree": 2})),
    "medium, 1F1B": (2, _job(MEDIUM, ROWS, **_pipeline("1F1B", 8))),
    "medium, Interleaved1F1B": (2, _job(MEDIUM, ROWS, "full", **_pipeline("Interleaved1F1B", 8))),
    "medium, FSDP on 4": (4, _job(MEDIUM, ROWS, "full", parallelism=EACH_BLOCK)),
    "medium, HSDP": (4, _job(MEDIUM, ROWS, parallelism={"data_parallel_replicate_degree": 2, **EACH_BLOCK})),
    "medium, tensor and FSDP": (4, _job(MEDIUM, ROWS, parallelism={"tensor_parallel_degree": 2, **EACH_BLOCK})),
    "medium, float8": (1, _job(MEDIUM, ROWS, "selective", float8=FLOAT8)),
    "medium, FSDP, float8": (2, _job(MEDIUM, ROWS, float8=FLOAT8 | GATHERED_FP8, parallelism=EACH_BLOCK)),
    "medium, compiled": (1, _job(MEDIUM, ROWS, "selective", compile={"enable": True})),
}


@dataclass(frozen=True)
class Result:
    """A case: bytes of the rank that takes the most, and seconds of a step in each round. Without any: not timed."""

    name: str
    ranks: int
    planned_bytes: int
    counted_bytes: int
    planned_seconds: tuple[float, ...] = ()
    measured_seconds: tuple[float, ...] = ()

    @property
    def memory_error(self) -> float:
        return self.planned_bytes / self.counted_bytes - 1

    @property
    def planned(self) -> float:
        return statistics.median(self.planned_seconds)

    @property
    def measured(self) -> float:
        return statistics.median(self.measured_seconds)

    @property
    def time_error(self) -> float:
        return self.planned / self.measured - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="cases whose name contains this; may be given several times")
    parser.add_argument("--bytes", action="store_true", help="count bytes alone")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in which steps are timed")
    parser.add_argument("--results", type=Path, default=RESULTS / "planner.json", help="where figures are added")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    results: dict[str, Result] = {}
    for number in range(1 if options.bytes else options.rounds):
        gpu = this_cpu() if options.bytes else _rates()
        for name in chosen(options.only):
            results[name] = compare(name, gpu, timed=not options.bytes, before=results.get(name))
            print(f"round {number + 1}: {line(results[name])}", flush=True)
            known[name] = asdict(results[name]) | {"machine": gpu.name, "torch": torch.__version__}
            options.results.write_text(json.dumps(known, indent=1) + "\n")
    options.out.write_text(page(known))


def _rates() -> Gpu:
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder, "rates.toml"), print)


def chosen(only: Iterable[str] | None) -> list[str]:
    """The names of the cases that contain one of the texts."""
    return [name for name in CASES if not only or any(text in name for text in only)]


def compare(name: str, gpu: Gpu, timed: bool, before: Result | None = None) -> Result:
    """A case in the plan and in reality. `before`: of earlier rounds, whose bytes stay and whose seconds are kept."""
    ranks, sections = CASES[name]
    run = Run(JobConfig.model_validate(sections), ranks)
    plan = forecast(run, traces_of(run, gpu, trace_run), gpu)
    real = real_steps(sections, ranks, counted=before is None, timed=timed)
    result = before or Result(name, ranks, plan.peak, max(int(each["bytes"]) for each in real))
    if not timed:
        return result
    return replace(
        result,
        planned_seconds=(*result.planned_seconds, plan.step_seconds),
        measured_seconds=(*result.measured_seconds, max(each["seconds"] for each in real)),
    )


def line(result: Result) -> str:
    """A case in a line of a terminal, with the seconds of its newest round."""
    text = f"{result.name:<28}{result.ranks:>2} {result.counted_bytes / MIB:9.2f} MiB {result.memory_error:+z7.2%}"
    if not result.measured_seconds:
        return text
    planned, measured = result.planned_seconds[-1], result.measured_seconds[-1]
    return f"{text}   {measured:8.4f} s, planned {planned:8.4f} {planned / measured - 1:+7.1%}"


# ------------------------------------------------------------------------------------------------------- real steps


def real_steps(sections: Sections, ranks: int, counted: bool, timed: bool) -> list[dict[str, float]]:
    """What each of `ranks` processes has counted and timed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with multiprocessing.get_context("spawn").Pool(ranks) as pool:
        jobs = [(rank, ranks, port, sections, counted, timed) for rank in range(ranks)]
        return pool.starmap(_rank, jobs, chunksize=1)


def _rank(rank: int, ranks: int, port: int, sections: Sections, counted: bool, timed: bool) -> dict[str, float]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run = Run(JobConfig.model_validate(sections), ranks)
    gc.disable()  # as in training
    with process_group(run.job) as device:
        found: dict[str, float] = {}
        if counted:
            found["bytes"] = _profiled(run, device) if ranks == 1 else _counted(run, device)
            gc.collect()
        if timed:
            found["seconds"] = _seconds(run, device)
        return found


def _step(run: Run, device: torch.device) -> Callable[[], TrainStep]:
    """The run's step over random rows, as a function without arguments."""
    mesh = build_mesh(run.degrees, device.type)
    update = TrainStep(run, mesh, build_model(run, mesh, device, lambda _: None), device)
    training = run.job.training
    shape = training.local_batch_size, training.seq_len
    rows = [_rows(shape, run) for _ in range(run.microbatches)]
    tokens = run.global_batch_size * training.seq_len

    def step() -> TrainStep:
        update(rows, tokens, 1e-4)
        return update

    return step


def _rows(shape: tuple[int, int], run: Run) -> Microbatch:
    ids, labels = (torch.randint(run.arch.vocab_size, shape) for _ in range(2))
    if not run.job.dataset.document_mask:
        return Microbatch(ids, labels)
    length = shape[1]
    documents = (torch.arange(length) * 4 // length).to(torch.int32).expand(shape).contiguous()
    positions = (torch.arange(length) % (length // 4)).expand(shape).contiguous()
    return Microbatch(ids, labels, documents, positions)


def _seconds(run: Run, device: torch.device) -> float:
    """The median time of a step."""
    step = _step(run, device)
    for _ in range(3):
        step()
    times: list[float] = []
    enough = torch.zeros(())
    while not enough:
        dist.barrier()
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
        enough.fill_(float(len(times) >= LEAST_STEPS and sum(times) > LEAST_SECONDS))
        dist.broadcast(enough, 0)  # all ranks do as many steps
    return statistics.median(times)


def _counted(run: Run, device: torch.device) -> int:
    """The most bytes of storages that are alive in a step, by a counter of operators."""
    counter = Counter()
    with counter.watching():
        step = _step(run, device)
        update = step()
        counter.mark(update.model.parameters(), "weights")
        for state in update.optimizer.state.values():
            counter.mark(state.values(), "optimizer state")
        counter.begin()
        step()
    return max(itertools.accumulate(change for _, change, _ in counter.events))


def _profiled(run: Run, device: torch.device) -> int:
    """The most bytes that are alive in the allocator in a step, all since the model was built."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step = _step(run, device)
        step()
        with torch.profiler.record_function("the step"):
            step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    span = next(event for event in events if event.get("name") == "the step")
    sizes = [
        event["args"]["Total Allocated"]
        for event in events
        if event.get("name") == "[memory]" and span["ts"] <= event["ts"] <= span["ts"] + span["dur"]
    ]
    return max(sizes)


# -------------------------------------------------------------------------------------------------------------- page


def page(known: Mapping[str, Mapping[str, Any]]) -> str:
    """The page of figures of the cases in `known`. Without times if none has been timed."""
    names = [name for name in CASES if name in known]
    results = [Result(**{key: known[name][key] for key in Result.__dataclass_fields__}) for name in names]
    first = known[names[0]]
    errors = [abs(each.memory_error) for each in results]
    timed = [each for each in results if each.measured_seconds]
    heads = ["job", "ranks", "MiB", "plan", "error"]
    rows = [
        [
            each.name,
            str(each.ranks),
            f"{each.counted_bytes / MIB:,.2f}",
            f"{each.planned_bytes / MIB:,.2f}",
            f"{each.memory_error:+z.2%}",
        ]
        for each in results
    ]
    summary = f"{len(names)} of {len(CASES)} cases were run. The largest error of memory is {max(errors):.2%}, the "
    summary += f"median {statistics.median(errors):.2%}."
    if timed:
        heads += ["ms a step", "plan", "error"]
        for row, each in zip(rows, results, strict=True):
            if each in timed:
                row += [f"{each.measured * 1000:,.0f}", f"{each.planned * 1000:,.0f}", f"{each.time_error:+.0%}"]
            else:
                row += ["", "", ""]
        times = [abs(each.time_error) for each in timed]
        summary += f" The largest error of time is {max(times):.0%}, the median {statistics.median(times):.0%}."
        rounds = max(len(each.measured_seconds) for each in timed)
        spread = [_spread(each.measured_seconds for each in timed), _spread(each.planned_seconds for each in timed)]
        summary += f" Times are medians of {rounds} rounds, each with rates that were measured in it. From the fastest"
        summary += (
            f" to the slowest round a step took {spread[0]:.0%} more time in the median, and its plan {spread[1]:.0%}."
        )
    else:
        summary += " Times of steps were not measured, because that needs a machine that does nothing else."
    command = "python benchmarks/planner.py" + ("" if timed else " --bytes")
    return "\n".join(
        [
            "# Plans beside real steps",
            "",
            f"`{command}` on {first['machine']}, Python {platform.python_version()}, torch {first['torch']}.",
            "",
            "Bytes are the most that are alive during a step, on the rank that takes the most: in the allocator, by",
            "torch's profiler, on one rank; in storages, by a counter of operators, on several.",
            "Compiled parts are planned as if they were not compiled.",
            "",
            summary,
            "",
            *table(heads, rows),
        ]
    )


def _spread(seconds: Iterable[Sequence[float]]) -> float:
    """How much longer the slowest round took than the fastest, in the median of the cases."""
    return statistics.median(max(each) / min(each) - 1 for each in seconds)


if __name__ == "__main__":
    main()

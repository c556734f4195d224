"""Steps on the ghost GPU launch, sync, compile and communicate exactly as expected.

Kernels compute nothing (see docs/internals/ghost.md), so these tests count events and ignore
losses. The counts depend on neither the machine nor its load.
"""

import json
import os
import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.ghost, pytest.mark.slow, pytest.mark.xdist_group("ghost")]

SMALL = "--model.n_layers 4 --training.seq_len 128 --training.local_batch_size 2"
UNLOGGED = "--checkpoint.no-enable --metrics.log_freq 50"
PIPELINE = "--parallelism.pipeline_parallel_degree 2 --training.global_batch_size 8"
TENSOR = "--parallelism.tensor_parallel_degree 2"
CONTEXT = "--parallelism.context_parallel_degree 2"
HYBRID = "--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree"
COMPILED = "--compile.enable"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
EVERY = f"{COMPILED} --compile.components model loss optimizer clip"
FLOAT8 = "--float8.enable --float8.min_features 0 --float8.recipe_name"
GATHER8 = "--float8.enable_fsdp_float8_all_gather --float8.precompute_float8_dynamic_scale_for_fsdp"
DOCUMENTS = "--dataset.document_mask"
VARLEN = f"{DOCUMENTS} --dataset.packing best_fit --model.attention_backend varlen"
# With this minimum, each block and the output are separate FSDP groups.
LARGE = "--parallelism.fsdp_min_num_params 60000"
SAVERS = f"{LARGE} --parallelism.memory_savers all"
LONG = f"{LARGE} --training.local_batch_size 640 --activation_checkpoint.mode full"
# Gradients of each of the 4 microbatches are reduced.
EACH = "--training.global_batch_size 16 --parallelism.fsdp_reduce microbatch"

EAGER_VARIANTS = {"": "", ", all": SAVERS}
VARIANTS = EAGER_VARIANTS | {", compiled": COMPILED, ", all, compiled": f"{SAVERS} {COMPILED}"}


def with_variants(jobs: dict[str, str], variants: dict[str, str] = VARIANTS) -> dict[str, str]:
    """Return each job in each variant, with the suffix of the variant in its name.

    By default, the variants are eager and compiled, each with memory savers "safe" and "all".
    """
    return {
        name + suffix: f"{options} {variant}"
        for name, options in jobs.items()
        for suffix, variant in variants.items()
    }


# Number of ranks -> name -> options. Jobs in SAMPLE are always tested, and the others with --ghost
# or --long.
JOBS = {
    1: {
        "eager": "",
        "compiled": COMPILED,
        "compiled, 2 blocks": f"{COMPILED} --model.n_layers 2",
        "all compiled": f"{EVERY} {DOCUMENTS}",
        "varlen": VARLEN,
        "varlen, compiled": f"{VARLEN} {COMPILED}",
        "stochastic": f"{EVERY} --training.dtype bfloat16 --optimizer.stochastic_rounding",
        "offload": "--training.enable_cpu_offload",
        "full activation checkpointing": f"{COMPILED} --activation_checkpoint.mode full",
        "selective activation checkpointing": f"{COMPILED} --activation_checkpoint.mode selective",
        "tensorwise": f"{FLOAT8} tensorwise {COMPILED}",
        "tensorwise, 2 blocks": f"{FLOAT8} tensorwise {COMPILED} --model.n_layers 2",
        "tensorwise without combo_kernels": f"{FLOAT8} tensorwise {COMPILED} without=combo_kernels",
        "rowwise": f"{FLOAT8} rowwise {COMPILED}",
        "rowwise without realize_opcount_threshold": (
            f"{FLOAT8} rowwise {COMPILED} without=realize_opcount_threshold"
        ),
        "rowwise_with_gw_hp": f"{FLOAT8} rowwise_with_gw_hp {COMPILED}",
    },
    2: {
        **with_variants(
            {
                "fsdp": "",
                "accumulation": "--training.global_batch_size 8",
                "offload": "--training.enable_cpu_offload",
                "cp": CONTEXT,
                "rowwise": f"{FLOAT8} rowwise",
                "fp8 all-gather": f"{FLOAT8} tensorwise {GATHER8}",
                "muon": "--optimizer.name Muon",
                "ema, guards": "--ema.decay 0.9 --guards.on_spike skip",
            }
        ),
        "fsdp, never": "--parallelism.fsdp_reshard_after_forward never",
        "large": LARGE,
        "large, long": LONG,
        "large, long, compiled": f"{LONG} {COMPILED}",
        "all, each": f"{SAVERS} {EACH}",
        "all, bf16": f"{SAVERS} --training.dtype bfloat16 --optimizer.stochastic_rounding",
        "large muon, all components compiled": f"{LARGE} --optimizer.name Muon {EVERY}",
        "hsdp": f"{HYBRID} 1",
        "tp": TENSOR,
        "pp": PIPELINE,
        "varlen, pp": f"{PIPELINE} {VARLEN}",
        "offload, each": f"{EACH} --training.enable_cpu_offload",
        "documents": f"{EVERY} {DOCUMENTS}",
        "tp, compiled": f"{TENSOR} {COMPILED}",
        "cp, compiled, documents": f"{CONTEXT} {COMPILED} {DOCUMENTS}",
        "cp, full": f"{CONTEXT} {COMPILED} --activation_checkpoint.mode full",
        "float8 tp": f"{FLOAT8} tensorwise {TENSOR} {COMPILED}",
        "float8 pp": f"{FLOAT8} rowwise {PIPELINE} {COMPILED}",
        "gpipe": f"{PIPELINE} {SCHEDULE} GPipe",
    },
    4: {
        **with_variants(
            {
                "hsdp": f"{HYBRID} 2",
                "tp": TENSOR,
                "1f1b": f"{PIPELINE} {SCHEDULE} 1F1B",
                "gpipe": f"{PIPELINE} {SCHEDULE} GPipe",
                "interleaved": f"{PIPELINE} {SCHEDULE} Interleaved1F1B",
                "looped": f"{PIPELINE} {SCHEDULE} LoopedBFS",
            }
        ),
        # These schedules cannot be compiled.
        **with_variants(
            {
                "zero bubble": f"{PIPELINE} {SCHEDULE} InterleavedZeroBubble",
                "zbv": f"{PIPELINE} {SCHEDULE} ZBVZeroBubble",
            },
            EAGER_VARIANTS,
        ),
        "hsdp, accumulation": f"{HYBRID} 2 {SAVERS} --training.global_batch_size 16",
        "muon, hsdp": f"{HYBRID} 2 {LARGE} --optimizer.name Muon",
        "cp x tp": f"{CONTEXT} {TENSOR}",
        "pp x tp": f"{PIPELINE} {TENSOR}",
    },
}
SAMPLE = [
    (2, "fsdp"),
    (2, "fsdp, all"),
    (2, "muon, all"),
    (2, "offload, each"),
    (2, "fsdp, compiled"),
    (2, "hsdp"),
    (2, "tp"),
    (2, "pp"),
]
ALL_JOBS = []
for num_ranks, jobs in JOBS.items():
    for name in jobs:
        marks = () if (num_ranks, name) in SAMPLE else pytest.mark.long
        ALL_JOBS.append(pytest.param(num_ranks, name, marks=marks))


def ghost(
    *command: str,
    ranks: int = 1,
    log: Path | None = None,
    code: int = 0,
    gib: float = 79.1,
    plugins: Path = ROOT,
    race: Path | None = None,
) -> str:
    """Run a command on the ghost GPU, and return its output.

    Args:
        race: Attach the race detector, and write its reports to this path, followed by ".PID".
    """
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    environment |= {"PYTHONPATH": f"{ROOT}:{plugins}"}
    environment |= {"GHOST_GPUS": str(ranks), "GHOST_GIB": str(gib)}
    if log is not None:
        environment["GHOST_LOG"] = str(log)
    if race is not None:
        environment["GHOST_RACE"] = str(race)
    done = subprocess.run(
        [str(ROOT / "scripts/ghost.sh"), *command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1200,
        check=False,
    )
    assert done.returncode == code, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def measurements(request, tmp_path_factory) -> Any:
    """Return a function that maps jobs to the measurements of each rank (see steps.py).

    Its argument is the number of ranks. `events` are the lines of the log.
    """
    run_all = request.config.getoption("--ghost") or request.config.getoption("--long")

    @cache
    def run(ranks: int) -> dict[str, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        jobs = {}
        for name, options in JOBS[ranks].items():
            if run_all or (ranks, name) in SAMPLE:
                jobs[name] = f"{SMALL} {UNLOGGED} {options}".split()
        (folder / "jobs.json").write_text(json.dumps(jobs))
        program = [str(Path(__file__).with_name("steps.py")), str(folder / "jobs.json")]
        ghost(
            *("torchrun", "--standalone", "--nproc-per-node", str(ranks)),
            *(*program, str(folder / "out")),
            ranks=ranks,
            log=folder / "log",
            race=folder / "race",
        )

        results = [json.loads((folder / f"out.{rank}").read_text()) for rank in range(ranks)]
        for log in folder.glob("log.*"):
            text = log.read_text()
            rank = re.search(r"^mark rank (\d+)$", text, re.MULTILINE)
            if rank is None:
                continue
            marked = re.findall(r"^mark job (.*)\n((?:.*\n)*?)mark end$", text, re.MULTILINE)
            for name, lines in marked:
                results[int(rank[1])][name]["events"] = lines.splitlines()
        return {name: [result[name] for result in results] for name in jobs}

    return run


def count_launches(events: list[str]) -> int:
    """Count kernel launches and memsets."""
    kinds = ("kernel", "triton", "matmul", "cudnn", "memset")
    return sum(event.split()[0] in kinds for event in events)


@pytest.mark.parametrize(("ranks", "name"), ALL_JOBS)
def test_a_step_runs_without_host_syncs_recompilation_and_races(
    measurements, ranks: int, name: str
):
    """Neither torch nor CUDA reports a host sync (steps.py fails otherwise)."""
    for rank in measurements(ranks)[name]:
        assert "error" not in rank, rank["error"]
        assert rank["recompilations"] == 0
        assert rank["graph_breaks"] == {}
        assert rank["alarms"] == 0
        assert count_launches(rank["events"]) > 100
        if name == "fsdp":
            # Gathers and small tensors take a segment each. Gradients are in the main stream.
            assert rank["of other streams"] <= 22 * 2**20

        waits = [event for event in rank["events"] if re.match("wait|copy .*pageable", event)]
        if name.startswith("offload"):
            # The CPU waits for the gradients of each microbatch, and for the loss.
            microbatches = 4 if "each" in name else 1
            parameters = 4 * 9 + 3
            assert waits == ["wait event"] * STEPS * (microbatches * parameters + 1)
        else:
            assert not waits


@pytest.mark.parametrize(
    "name",
    ["1b, tensor 2", pytest.param("8b, full, compiled, 4 microbatches", marks=pytest.mark.long)],
)
def test_a_plan_is_close_to_the_memory_of_the_allocator(tmp_path, name: str):
    """Plans are as accurate as benchmarks/planner.md shows. Collectives need no other rank."""
    files = ["--results", str(tmp_path / "results.json"), "--out", str(tmp_path / "page.md")]
    ghost("python", "benchmarks/planner.py", "--only", name, *files)
    (result,) = json.loads((tmp_path / "results.json").read_text()).values()

    assert result["planned"] == pytest.approx(result["allocated"], rel=0.03)
    assert result["planned_reserved"] == pytest.approx(result["reserved"], rel=0.05)


STEPS = 2  # measured steps of each job, as in steps.py

# Hidden size C of the debug model, and numbers of parameters: the matrices and the norms of one
# block, the embedding (as large as the output layer), all four blocks, and the whole model.
C = 256
MATRICES = 2 * 256 * (256 + 128) + 3 * 256 * 640
NORMS = 2 * 256
EMBEDDING = 4096 * 256
BLOCKS = 4 * (MATRICES + NORMS)
WHOLE = BLOCKS + 2 * EMBEDDING + C
# Tokens of a rank in a microbatch.
TOKENS = 2 * 128
# Bytes of half of the hidden states in bf16, which tensor-parallel ranks exchange.
PART = 2 * TOKENS * C // 2
# FSDP gathers blocks and the final norm twice, in bf16, and reduces gradients in fp32.
GATHERED = 2 * (WHOLE + BLOCKS + C) // 2
REDUCED = 4 * WHOLE // 2
FSDP = {("all_gather", 2): GATHERED, ("reduce_scatter", 2): REDUCED}
# Keys and values of a rank's positions, gathered in the forward pass; their gradients come back.
CONTEXT_PART = 4 * 2 * 2 * (TOKENS // 2) * 128

# (ranks, job) -> (collective, group size) -> bytes of one step on one rank: the input of an
# all-gather, all-reduce or send, and the output of a reduce-scatter or receive. Jobs all-reduce 8
# bytes for token counts, and 24 bytes for squared norms, loss and requests.
TRAFFIC = {
    (2, "fsdp"): FSDP | {("all_reduce", 2): 32},
    (2, "fsdp, compiled"): FSDP | {("all_reduce", 2): 32},
    (2, "documents"): FSDP | {("all_reduce", 2): 32},
    (2, "offload"): FSDP | {("all_reduce", 2): 8},  # norms are summed by gloo
    (2, "fsdp, never"): {
        ("all_gather", 2): 2 * WHOLE // 2,
        ("reduce_scatter", 2): REDUCED,
        ("all_reduce", 2): 32,
    },
    (2, "hsdp"): {("all_reduce", 2): 4 * WHOLE + 32},
    (4, "hsdp"): FSDP | {("all_reduce", 2): REDUCED, ("all_reduce", 4): 32},
    # The job has two microbatches. The output layer stays unsharded between them.
    (2, "accumulation"): {
        ("all_gather", 2): 2 * (2 * EMBEDDING + EMBEDDING + 4 * C + 4 * BLOCKS) // 2,
        ("reduce_scatter", 2): REDUCED,
        ("all_reduce", 2): 32,
    },
    # Block matrices take a byte for each element, and each of the 28 matrices has a scale.
    (2, "fp8 all-gather"): {
        ("all_gather", 2): (2 * (2 * EMBEDDING + 2 * C) + 2 * 4 * (MATRICES + 2 * NORMS)) // 2,
        ("reduce_scatter", 2): REDUCED,
        ("all_reduce", 2): 32 + 28 * 4,
    },
    # Blocks communicate twice in each pass, and embedding and loss once. The loss and the
    # gradients of norms are summed over ranks.
    (2, "tp"): {
        ("all_gather", 2): (4 * 4 + 2) * PART,
        ("reduce_scatter", 2): (4 * 4 + 2) * PART,
        ("all_reduce", 2): 3 * 4 * TOKENS + 2 * (4 * NORMS + C) + 24,
        ("all_reduce", 1): 8,
    },
    (2, "cp"): {
        ("all_gather", 2): GATHERED + CONTEXT_PART,
        ("reduce_scatter", 2): REDUCED + CONTEXT_PART,
        ("all_reduce", 2): 24,
        ("all_reduce", 1): 8,
    },
    # The job has four microbatches.
    (2, "pp"): {
        ("send", 2): 4 * 2 * PART,
        ("recv", 2): 4 * 2 * PART,
        ("all_reduce", 2): 24,
        ("all_reduce", 1): 8,
    },
}
# Full activation checkpointing gathers keys and values again. Otherwise, a compiled block keeps the
# gathered keys and values.
TRAFFIC[2, "cp, full"] = TRAFFIC[2, "cp"] | {("all_gather", 2): GATHERED + 2 * CONTEXT_PART}
# FP8 halves the gathered bytes of blocks, and reduces 19 float64 maxima in each block (18 before
# torch 2.14).
MAXIMA = TRAFFIC[2, "tp"]["all_reduce", 2] + 4 * 19 * 8
TRAFFIC[2, "float8 tp"] = TRAFFIC[2, "tp"] | {
    ("all_gather", 2): (4 * 2 + 2) * PART,
    ("all_reduce", 2): MAXIMA,
}
TRAFFIC |= {(2, f"{name}, compiled"): TRAFFIC[2, name] for name in ("tp", "cp", "fp8 all-gather")}


@pytest.mark.parametrize(("ranks", "name"), [p for p in ALL_JOBS if p.values in TRAFFIC])
def test_ranks_communicate_exactly_the_bytes_that_the_layout_needs(
    measurements, ranks: int, name: str
):
    for rank in measurements(ranks)[name]:
        moved = Counter[tuple[str, int]]()
        for event in rank["events"]:
            if match := re.fullmatch(r"nccl (\w+) (\d+) of (\d+)", event):
                moved[match[1], int(match[3])] += int(match[2])
        assert {group: count / 2 for group, count in moved.items()} == TRAFFIC[ranks, name]


@pytest.mark.long
# FP8 blocks launch up to 67 kernels with torch 2.13, and 68.5 with torch 2.14.
@pytest.mark.parametrize(("name", "limit"), [("compiled", 30 + 17), ("tensorwise", 52 + 17)])
def test_a_compiled_block_launches_few_kernels(measurements, name: str, limit: int):
    """Subtract the launches of two jobs, so only blocks and their FSDP copies and updates count."""
    (four_blocks,) = measurements(1)[name]
    (two_blocks,) = measurements(1)[f"{name}, 2 blocks"]
    launches = count_launches(four_blocks["events"]) - count_launches(two_blocks["events"])

    assert launches / 2 / STEPS <= limit


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "option"),
    [("tensorwise", "combo_kernels"), ("rowwise", "realize_opcount_threshold")],
)
def test_a_compiler_option_of_float8_blocks_saves_launches(measurements, job: str, option: str):
    (with_option,) = measurements(1)[job]
    (without_option,) = measurements(1)[f"{job} without {option}"]

    assert count_launches(with_option["events"]) < count_launches(without_option["events"])


def test_each_way_to_start_resumes_the_checkpoints_of_the_others(tmp_path):
    """The launcher, one process, torchrun and Python resume from each other's checkpoints."""
    run = str(tmp_path / "run")
    pinned = f"{SMALL} --checkpoint.interval 2 --checkpoint.async_mode async_with_pinned_mem"
    options = [*pinned.split(), "--job.dump_folder", run, "--training.steps"]
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom titanlite.load_run import load_run\n"
        "from titanlite.train.trainer import Trainer\n"
        "with Trainer(load_run(sys.argv[1:], world_size=1)) as trainer:\n    trainer.train()\n"
    )
    starts = [
        (2, ["python", "-m", "titanlite", "launch"]),
        (1, ["python", "-m", "titanlite", "train"]),
        (2, ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "titanlite", "train"]),
        (1, ["python", str(program)]),
    ]
    for number, (ranks, command) in enumerate(starts):
        first = 2 * number
        last = first + 2
        log = tmp_path / f"log{number}"
        output = ghost(*command, *options, str(last), ranks=ranks, log=log)
        assert f"Finished after step {last}." in output
        assert first == 0 or f"Resumed after step {first}" in output

        events = "\n".join(path.read_text() for path in tmp_path.glob(f"log{number}.*"))
        copies = re.findall(r"^copy device pinned (\d+)$", events, re.MULTILINE)
        # Weights and two moments are copied through pinned memory.
        assert sum(map(int, copies)) >= 3 * 4 * WHOLE

    generate = ["generate", "--checkpoint", run, "--prompt", "def", "--max-new-tokens", "4"]
    assert "def" in ghost("python", "-m", "titanlite", *generate, "--temperature", "0")


def test_each_of_four_pinned_async_saves_completes(tmp_path):
    pinned = "--checkpoint.interval 1 --checkpoint.async_mode async_with_pinned_mem"
    options = f"{SMALL} {pinned} --training.steps 4 --job.dump_folder {tmp_path / 'run'}".split()

    ghost("python", "-m", "titanlite", "train", *options, log=tmp_path / "log")

    saved = [path.name for path in sorted((tmp_path / "run/checkpoint").iterdir())]

    assert saved == [f"step-0000000{step}" for step in (1, 2, 3, 4)]

    ghost("python", "-m", "titanlite", "verify", str(tmp_path / "run"))


PLUGIN = """
import ctypes, os
from pathlib import Path
from titanlite import register
from titanlite.hooks.hook import Hook

mark = ctypes.CDLL("libcuda.so.1").ghost_mark


@register("hook", "watch")
class Watch(Hook):
    def before_step(self, step):
        if step == 4:
            mark(b"begin")

    def act(self, step, request):
        if step == 8:
            mark(b"end")

    def ended(self, step, stopped):
        files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        Path(__file__).with_name(f"sockets.{os.environ['RANK']}").write_text("".join(
            f"{file} " for file in files if file.startswith("socket:")
        ))
"""


def test_the_loop_opens_no_socket_and_waits_for_nothing_between_logged_steps(tmp_path):
    """The ranks agree on what to do after each step through the GPU."""
    (tmp_path / "watching.py").write_text(PLUGIN)
    options = (
        f"{SMALL} {UNLOGGED} --job.plugins watching --job.hooks watch --training.steps 9".split()
    )
    options += ["--job.dump_folder", str(tmp_path / "run")]
    launch = ["python", "-m", "titanlite", "launch"]
    ghost(*launch, *options, ranks=2, log=tmp_path / "log", plugins=tmp_path)

    assert [(tmp_path / f"sockets.{rank}").read_text() for rank in range(2)] == ["", ""]

    steps = [re.findall(r"^mark begin\n(.*?)mark end$", log.read_text(), re.MULTILINE | re.DOTALL)
             for log in tmp_path.glob("log.*")]  # fmt: skip
    marked_steps = [step for (step,) in filter(None, steps)]

    assert len(marked_steps) == 2

    for step in marked_steps:
        assert step.count("copy device pinned 8\n") == 5
        assert not re.search("^wait|pageable", step, re.MULTILINE)


def test_steps_are_not_skipped_because_of_meaningless_values(tmp_path):
    """The job compares replicas after each step, and uses all features that read from the GPU."""
    compared = f"{HYBRID} 1 --guards.compare_every 1 --ema.decay 0.9 --metrics.log_freq 1"
    read = "--validation.freq 2 --validation.holdout 0.1 --samples.freq 3 --samples.prompts def"
    saved = f"--checkpoint.async_mode async_with_pinned_mem --job.dump_folder {tmp_path}"
    options = f"{SMALL} {compared} {read} {saved} --training.steps 6".split()

    assert "Finished after step 6" in ghost(
        "python", "-m", "titanlite", "launch", *options, ranks=2
    )

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["skipped_steps"] for line in lines] == [0] * 6


@pytest.mark.long
def test_an_out_of_memory_error_shows_the_plan(tmp_path):
    """The error contains the report of the allocator and the plan."""
    options = [*SMALL.split(), "--job.dump_folder", str(tmp_path), "--training.seq_len", "8192"]
    output = ghost(
        "python", "-m", "titanlite", "train", *options, gib=0.5, code=1, log=tmp_path / "log"
    )

    assert "Out of memory at step 1" in output
    assert "The plan: " in output
    assert "Traceback" not in output
    assert re.search(
        r"^full cu\w+ \d+$",
        "".join(log.read_text() for log in tmp_path.glob("log.*")),
        re.MULTILINE,
    )


def test_split_communicators_have_their_own_size_and_ranks(tmp_path: Path):
    """torch splits the communicator of the world if the GPU of a rank is known from the start."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, torch, torch.distributed as dist\n"
        "rank = int(os.environ['RANK'])\n"
        "torch.cuda.set_device(rank)\n"
        "dist.init_process_group('nccl', device_id=torch.device('cuda', rank))\n"
        "mesh = dist.init_device_mesh('cuda', (2, 2), mesh_dim_names=('rows', 'columns'))\n"
        "gathered = torch.zeros(2, dtype=torch.int64, device='cuda')\n"
        "own = torch.full((1,), rank, device='cuda')\n"
        "dist.all_gather_into_tensor(gathered, own, group=mesh.get_group('columns'))\n"
        "assert gathered.tolist() == [rank, rank]\n"
        "received = [None]\n"
        "if rank < 2:\n"
        "    dist.send_object_list([f'from {rank}'], group_dst=1, group=mesh.get_group('rows'))\n"
        "else:\n"
        "    dist.recv_object_list(received, group_src=0, group=mesh.get_group('rows'))\n"
        "    assert received == [f'from {rank - 2}']\n"
        "dist.destroy_process_group()\n"
        "print('all received')\n"
    )

    output = ghost("torchrun", "--standalone", "--nproc-per-node", "4", str(program), ranks=4)
    assert output.count("all received") == 4

"""Which process this one is, by the variables of schedulers."""

import pytest

from fp8jax.device import processes
from fp8jax.lm.cli import cluster
from fp8jax.lm.cli.cluster import Place, place_of

# What srun gives the third of four tasks on two nodes.
SRUN = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "node[007-008,12],other",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
# What the shell of `salloc -n 4` has: a step of its own, of one task.
SALLOC = SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
# What a batch script has before srun.
SBATCH = {name: value for name, value in SRUN.items() if "STEP" not in name}
MPIRUN = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, None),
        (SALLOC, None),
        (SBATCH, None),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (SRUN, ("node007:61809", 4, 2, [0])),
        (SRUN | {"SLURM_STEP_NODELIST": "a-1,b"}, ("a-1:61809", 4, 2, [0])),
        (SRUN | {"JAX_COORDINATOR_PORT": "99"}, ("node007:99", 4, 2, [0])),
        # One task a node has all its GPUs, and a task that sees its own alone has those.
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, ("node007:61809", 4, 2, None)),
        (SRUN | {"CUDA_VISIBLE_DEVICES": "5"}, ("node007:61809", 4, 2, None)),
        (
            SRUN | {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_LOCALID": "1"},
            ("node007:61809", 4, 2, [2, 3]),
        ),
        (
            SRUN | {"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_GPUS_PER_TASK": "2"},
            ("node007:61809", 4, 2, None),
        ),
        (
            SRUN | {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_PER_TASK": "h200:2"},
            ("node007:61809", 4, 2, [0, 1]),
        ),
        (MPIRUN, ("10.96.0.1:62624", 2, 1, [1])),
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        (SRUN | MPIRUN, ("10.96.0.1:62624", 2, 1, [1])),  # mpirun started its ranks by srun
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ],
)
def test_a_step_of_several_tasks_is_a_run_of_several_processes(variables, expected):
    fields = ("coordinator", "count", "index", "device_ids")
    place = None if expected is None else Place(**dict(zip(fields, expected, strict=True)))
    assert place_of("auto", variables) == place
    assert place_of("none", variables) is None


@pytest.mark.parametrize("variables", [SRUN, MPIRUN])
def test_coordinator_and_numbers_are_those_of_jax(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place = place_of("auto", variables)
    method = "slurm" if variables is SRUN else "ompi"
    assert processes.detect(method) == (place.coordinator, place.count, place.index)


@pytest.mark.parametrize(
    "name, variables, method",
    [
        ("auto", {"TPU_WORKER_HOSTNAMES": "a,b"}, None),
        ("auto", {"TPU_PROCESS_ADDRESSES": "a", "MEGASCALE_COORDINATOR_ADDRESS": "b"}, None),
        ("auto", {"KUBERNETES_SERVICE_HOST": "a", "JOB_COMPLETION_INDEX": "1"}, "k8s"),
        ("tpu", {}, None),
        ("k8s", {}, "k8s"),
    ],
)
def test_jax_detects_tpus_and_kubernetes(name, variables, method, monkeypatch):
    asked = []
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: name == "kubernetes")
    monkeypatch.setattr(processes, "detect", lambda method: asked.append(method) or ("a:1", 2, 1))
    assert place_of(name, variables) == Place(coordinator="a:1", count=2, index=1)
    monkeypatch.setattr(processes, "detect", lambda method: asked.append(method) or ("a:1", 1, 0))
    assert place_of(name, variables) is None  # one host
    assert asked == [method, method]


def test_flags_go_before_what_the_scheduler_says():
    given = place_of("auto", SRUN, "there:1", 3, 1)
    assert given == Place(coordinator="there:1", count=3, index=1)
    place = place_of("auto", SRUN, "there:1")
    assert place == Place(coordinator="there:1", count=4, index=2, device_ids=[0])
    without = MPIRUN | {"OMPI_MCA_orte_hnp_uri": ""}
    assert place_of("auto", without, "there:1").coordinator == "there:1"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("auto", {}, None, 2), "--coordinator, --num_processes and --process_id need each other"),
        (("none", SRUN, None, 2), "need each other"),
        (("auto", {}, "a:1", 2, 2), "--process_id=2 must be below --num_processes=2"),
        (("auto", {}, "a", 2, 1), "--coordinator=a must be HOST:PORT"),
        (("slurm", SALLOC), r"--cluster=slurm: .* \(\$SLURM_STEP_NUM_TASKS\)"),
        (("auto", MPIRUN | {"OMPI_MCA_orte_hnp_uri": ""}), "Open MPI 5 .*--coordinator=HOST:PORT"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        place_of(*arguments)

"""Which process of how many this one is, from flags or from what a scheduler says.

Schedulers leave their variables also where a single process runs: in the shell of an allocation,
in a batch script before `srun`. Only a step of several tasks is a run of several processes.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

CLUSTERS = ("auto", "none", "slurm", "ompi", "k8s", "tpu")

_PORTS = 2**12  # the highest ports, of which JAX, too, takes one by the number of the job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The place of this process among those of a run.

    Attributes:
      coordinator: HOST:PORT of process 0.
      count: number of processes.
      index: of this one, from 0.
      device_ids: GPUs that are this process's, among those that it sees; None for all.
    """

    coordinator: str
    count: int
    index: int
    device_ids: list[int] | None = None


def place_of(
    cluster: str,
    variables: Mapping[str, str],
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
) -> Place | None:
    """Returns the place of this process, None for a process by itself.

    Args:
      cluster: one of `CLUSTERS`. "auto" takes the first that runs more than one task here, or none.
      variables: of the environment.
      coordinator, count, index: from flags; they go before what the scheduler says.

    Raises:
      ValueError: the flags do not fit together, or the scheduler does not say enough.
    """
    if coordinator is None or count is None or index is None:
        detected = _detect(cluster, variables, coordinator)
        if detected is None:
            if coordinator is None and count is None and index is None:
                return None
            raise ValueError(
                "--coordinator, --num_processes and --process_id need each other: no scheduler "
                "that runs several tasks was found (--cluster)"
            )
        found = dataclasses.replace(
            detected,
            coordinator=detected.coordinator if coordinator is None else coordinator,
            count=detected.count if count is None else count,
            index=detected.index if index is None else index,
        )
    else:
        found = Place(coordinator=coordinator, count=count, index=index)
    if found.index >= found.count:
        raise ValueError(f"--process_id={found.index} must be below --num_processes={found.count}")
    if not re.fullmatch(r".+:\d+", found.coordinator):
        raise ValueError(f"--coordinator={found.coordinator} must be HOST:PORT")
    return found


def _detect(cluster: str, variables: Mapping[str, str], coordinator: str | None) -> Place | None:
    """Returns what the scheduler says, None if it runs one task here."""
    if cluster == "auto":
        # mpirun starts its ranks by srun, if there is SLURM.
        for detect in (_ompi, _slurm, _kubernetes, _tpu):
            if (place := detect(variables, coordinator)) is not None:
                return place
        return None
    if cluster == "none":
        return None
    if cluster in ("k8s", "tpu"):
        return _by_jax("k8s" if cluster == "k8s" else None)
    place = {"slurm": _slurm, "ompi": _ompi}[cluster](variables, coordinator)
    if place is None:
        name = "SLURM_STEP_NUM_TASKS" if cluster == "slurm" else "OMPI_COMM_WORLD_SIZE"
        raise ValueError(f"--cluster={cluster}: this is not one of several tasks (${name})")
    return place


def _by_jax(method: str | None) -> Place | None:
    """Returns what JAX detects; None for a single process."""
    from fp8jax.device import processes  # imports JAX

    coordinator, count, index = processes.detect(method)
    return Place(coordinator=coordinator, count=count, index=index) if count > 1 else None


def _slurm(variables: Mapping[str, str], coordinator: str | None) -> Place | None:
    """A task of `srun`. The shell of an allocation has a step of one task, or none."""
    needed = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
    if any(name not in variables for name in (*needed, "SLURM_JOB_ID")):
        return None
    count = int(variables["SLURM_STEP_NUM_TASKS"])
    if count < 2:
        return None
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", variables["SLURM_STEP_NODELIST"])
    assert first is not None
    host = first[1] + (first[2] or "")
    return Place(
        coordinator=f"{host}:{_port(variables, int(variables['SLURM_JOB_ID']))}",
        count=count,
        index=int(variables["SLURM_PROCID"]),
        device_ids=_share(
            variables, int(variables["SLURM_LOCALID"]), _tasks_here(variables, count)
        ),
    )


def _tasks_here(variables: Mapping[str, str], count: int) -> int:
    """Returns how many tasks of the step run on this node, as in "4(x2),3"."""
    if not {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"} <= set(variables):
        return count
    each = [
        int(tasks)
        for tasks, times in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", variables["SLURM_STEP_TASKS_PER_NODE"]
        )
        for _ in range(int(times or 1))
    ]
    return each[int(variables["SLURM_NODEID"])]


def _ompi(variables: Mapping[str, str], coordinator: str | None) -> Place | None:
    """A task of Open MPI's `mpirun`."""
    if "OMPI_COMM_WORLD_SIZE" not in variables:
        return None
    count = int(variables["OMPI_COMM_WORLD_SIZE"])
    if count < 2:
        return None
    if coordinator is None:
        uri = variables["OMPI_MCA_orte_hnp_uri"] if "OMPI_MCA_orte_hnp_uri" in variables else ""
        # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911: the job, and addresses of mpirun's host.
        found = re.match(r"(\d+)\..*?tcp6?://\[?([^,:\]]+)", uri)
        if found is None:
            raise ValueError(
                f"mpirun started {count} tasks, but Open MPI 5 and later do not say on which host "
                "the first one runs: add --coordinator=HOST:PORT with that host and a free port"
            )
        coordinator = f"{found[2]}:{_port(variables, int(found[1]) // 2**12)}"
    return Place(
        coordinator=coordinator,
        count=count,
        index=int(variables["OMPI_COMM_WORLD_RANK"]),
        device_ids=_share(
            variables,
            int(variables["OMPI_COMM_WORLD_LOCAL_RANK"]),
            int(variables["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        ),
    )


def _kubernetes(variables: Mapping[str, str], coordinator: str | None) -> Place | None:
    """A pod of an Indexed Job, whose size JAX asks Kubernetes for with the package kubernetes.

    Without that package such a pod is a process by itself: many Indexed Jobs are, and
    `experiments.launch render --target=jobset` gives the flags.
    """
    if not {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= set(variables):
        return None
    return _by_jax("k8s") if importlib.util.find_spec("kubernetes") else None


def _tpu(variables: Mapping[str, str], coordinator: str | None) -> Place | None:
    """A host of a TPU pod: GKE lists the hosts, else Google's metadata do, which JAX reads."""
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
        if name in variables:
            several = "," in variables[name] or "MEGASCALE_COORDINATOR_ADDRESS" in variables
            return _by_jax(None) if several else None
    if importlib.util.find_spec("libtpu") is None or "TPU_SKIP_MDS_QUERY" in variables:
        return None
    chips = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return _by_jax(None) if chips else None


def _port(variables: Mapping[str, str], job: int) -> int:
    if "JAX_COORDINATOR_PORT" in variables:
        return int(variables["JAX_COORDINATOR_PORT"])
    return 2**16 - _PORTS + job % _PORTS


def _share(variables: Mapping[str, str], local: int, tasks: int) -> list[int] | None:
    """Returns which of the GPUs that this task sees are its own; None for all.

    A task by itself on its node has them all, and so has one to which the scheduler shows its own
    alone. JAX gives each task one GPU, the one of its local number, which fails in both cases.
    """
    visible = variables["CUDA_VISIBLE_DEVICES"] if "CUDA_VISIBLE_DEVICES" in variables else None
    if tasks == 1:
        return None
    if visible is None:
        return [local]
    gpus = visible.split(",")
    name = "SLURM_GPUS_PER_TASK"  # "2", or with a type, as in "h200:2"
    if name in variables and variables[name].rpartition(":")[2] == str(len(gpus)):
        return None
    each = len(gpus) // tasks
    return [*range(local * each, (local + 1) * each)] or None

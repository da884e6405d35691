"""A gated model that learns from the dense one: a loss for any training loop, and a small loop."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockgate.checkpoint.states import read_state, write_state
from blockgate.convert.closeness import call, floating_tensors
from blockgate.errors import invalid, missing_extra
from blockgate.grid import check_size
from blockgate.schedule import SparsityRamp

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["COMPARE", "distil", "distil_loss"]

COMPARE = ("logits", "hidden", "embedding")
# What a checkpoint holds.
_KEYS = frozenset({"steps", "student", "optimizer", "schedule", "ramp", "random", "losses"})


def distil_loss(student: Any, teacher: Any, compare: str = "hidden", *, temperature: float = 1.0) -> Tensor:
    """How far what the student returned is from what the teacher did.

    Args:
        student: what the gated model returned: a tensor, a tuple, or a Hugging Face output.
        teacher: what the dense model returned for the same input, of the same shapes.
        compare: "logits": the divergence of the predicted distributions, of `.logits` or the first tensor;
            "hidden": the mean square of the difference of each floating tensor, relative to the teacher's;
            "embedding": 1 - cosine of `.pooler_output`, or the first tensor.
        temperature: of both distributions, for logits.
    """
    if compare not in COMPARE:
        raise invalid("compare", expected=f"one of {COMPARE}", got=compare, remedy="Or write a loss of your own.")
    if compare == "hidden":
        pairs = list(zip(_tensors(student), _tensors(teacher), strict=True))
        parts = [(s - t).square().mean() / t.square().mean().clamp(min=1e-12) for s, t in pairs if s.shape == t.shape]
        if len(parts) != len(pairs) or not pairs:
            raise _unlike([s for s, _ in pairs], [t for _, t in pairs])
        return torch.stack(parts).mean()
    name = "logits" if compare == "logits" else "pooler_output"
    mine, wanted = (_named(output, name) for output in (student, teacher))
    if mine.shape != wanted.shape:
        raise _unlike([mine], [wanted])
    if compare == "embedding":
        return (1 - F.cosine_similarity(mine.float(), wanted.float(), dim=-1)).mean()
    predicted, known = (F.log_softmax(t.float() / temperature, -1).flatten(0, -2) for t in (mine, wanted))
    return F.kl_div(predicted, known, log_target=True, reduction="batchmean") * temperature**2


def distil(
    student: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int,
    sparsity: float | None = None,
    ramp: tuple[int, int] | None = None,
    loss: str | Callable[[Any, Any], Tensor] = "hidden",
    lr: float = 1e-4,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int = 200,
    fabric: Any = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> list[float]:
    """Trains a gated model to answer as the dense one does, on Lightning Fabric.

    Args:
        student: the gated model; all its parameters that require gradients are trained.
        teacher: the dense model, with parameters of its own.
        batches: inputs of both, as for `calibrate`: a list, or anything that can be gone through again and again.
        steps: updates by AdamW, with a learning rate that falls to 0.
        sparsity: at the end; if None, it stays as it is.
        ramp: the steps between which the sparsity rises from 0; from the start to half of the steps if None.
        loss: what `distil_loss` compares, or a function of what both models returned.
        lr: the learning rate at the beginning.
        checkpoint: a file that is written every `save_every` steps and at the end. If it is there, training goes on
            from it; the call must be the same.
        save_every: steps between checkpoints.
        fabric: a launched `lightning.fabric.Fabric`; if None, one on the CPU.
        progress: called after every step with how many are done, of how many, and the loss.

    Returns:
        The loss of every step, those before a resumption included.
    """
    steps = check_size("steps", steps)
    own = {id(p) for p in student.parameters()}
    if any(id(p) in own for p in teacher.parameters()):
        raise invalid(
            "teacher",
            expected="parameters of its own",
            got="some of the student's",
            remedy="Take teacher = copy.deepcopy(model) before sparsify_.",
        )
    fabric = fabric or _fabric()
    path = None if checkpoint is None else Path(checkpoint)
    # Before a ramp sets the sparsity: a checkpoint that is refused leaves the student as it was.
    state = _read(path, steps, sparsity is not None, student, fabric) if path is not None and path.exists() else None
    optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    begin, end = ramp or (0, steps // 2)
    raised = None if sparsity is None else SparsityRamp(student, sparsity, begin, end)
    losses: list[float] = []
    if path is not None and state is not None:
        losses = _resume(path, state, student, optimizer, schedule, raised, fabric)
    compare = functools.partial(distil_loss, compare=loss) if isinstance(loss, str) else loss
    model, fast = fabric.setup(student, optimizer)
    teacher = fabric.to_device(teacher)
    modes = student.training, teacher.training
    model.train()
    teacher.eval()
    try:
        for batch in itertools.islice(_endless(batches), len(losses), steps):
            moved = fabric.to_device(batch)
            with torch.no_grad():
                wanted = call(teacher, moved)
            value = compare(call(model, moved), wanted)
            fast.zero_grad()
            fabric.backward(value)
            fast.step()
            schedule.step()
            if raised is not None:
                raised.step()
            losses.append(float(value.detach()))
            done = len(losses)
            if progress is not None:
                progress(done, steps, losses[-1])
            if path is not None and (done % save_every == 0 or done == steps):
                now = _state(steps, student, optimizer, schedule, raised, fabric) | {"losses": losses}
                if fabric.is_global_zero:
                    write_state(path, now)
                fabric.barrier()
    finally:
        student.train(modes[0])
        teacher.train(modes[1])
    return losses


def _fabric() -> Any:
    try:
        from lightning.fabric import Fabric
    except ImportError as error:
        raise missing_extra("distil", error) from error
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return fabric


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        one = None
        for one in batches:
            yield one
        if one is None:
            raise invalid("batches", expected="at least one", got="none", remedy="A generator is used up: pass a list.")


def _state(steps: int, student: nn.Module, optimizer: Any, schedule: Any, ramp: Any, fabric: Any) -> dict[str, Any]:
    random = torch.get_rng_state()
    return {
        "steps": steps,
        "student": student.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "ramp": None if ramp is None else ramp.state_dict(),
        # Of every process: what is dropped differs between them.
        "random": fabric.all_gather(random.to(fabric.device)).cpu().reshape(fabric.world_size, len(random)),
    }


def _read(path: Path, steps: int, ramp: bool, student: nn.Module, fabric: Any) -> dict[str, Any]:
    """What a checkpoint holds, once it is known to be of this run."""
    state = read_state(
        path, writer="distil", keys=_KEYS, damaged="Put a copy in its place, or delete it to begin again."
    )
    first = (state["steps"], state["ramp"] is not None, len(state["random"]))
    if first != (steps, ramp, fabric.world_size):
        raise invalid(
            str(path),
            expected="the checkpoint of " + _told(steps, ramp, fabric.world_size),
            got=_told(*first),
            remedy="Pass the arguments of the first call, or another file.",
        )
    own, saved = student.state_dict(), state["student"]
    unfit = [*own.keys() ^ saved.keys()]
    unfit += [name for name in own.keys() & saved.keys() if _unfit(own[name], saved[name])]
    if unfit:
        raise _other_model(path, f"other tensors: {', '.join(sorted(unfit)[:4])}")
    return state


def _resume(
    path: Path, state: dict[str, Any], student: nn.Module, optimizer: Any, schedule: Any, ramp: Any, fabric: Any
) -> list[float]:
    """Takes up what a checkpoint holds; returns the losses so far."""
    try:
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        if ramp is not None:
            ramp.load_state_dict(state["ramp"])
        student.load_state_dict(state["student"])
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise _other_model(path, " ".join(str(error).split())[:200]) from None
    torch.set_rng_state(state["random"][fabric.global_rank])
    losses: list[float] = state["losses"]
    return losses


def _other_model(path: Path, got: str) -> Exception:
    return invalid(
        str(path),
        expected="the checkpoint of a model like this one",
        got=got,
        remedy="Pass the student of the first call, or another file.",
    )


def _told(steps: int, ramp: bool, processes: int) -> str:
    return f"a run of {steps} steps {'with' if ramp else 'without'} a ramp in {processes} process(es)"


def _unfit(own: Any, saved: Any) -> bool:
    return isinstance(own, Tensor) and (not isinstance(saved, Tensor) or own.shape != saved.shape)


def _tensors(output: Any) -> list[Tensor]:
    return list(floating_tensors(output))


def _named(output: Any, name: str) -> Tensor:
    """The tensor of this name in what a model returned, or the first one."""
    named = getattr(output, name, None)
    found = [named] if isinstance(named, Tensor) else _tensors(output)
    if not found:
        raise invalid(
            "distil_loss", expected="a model that returns tensors", got=type(output).__name__, remedy="Check."
        )
    return found[0]


def _unlike(student: list[Tensor], teacher: list[Tensor]) -> Exception:
    return invalid(
        "distil_loss",
        expected=f"outputs of the teacher's shapes, {[tuple(t.shape) for t in teacher]}",
        got=[tuple(t.shape) for t in student],
        remedy="Student and teacher must be models of one make.",
    )

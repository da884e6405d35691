"""The training loop: updates, validation, checkpoints, and the way back from a checkpoint, bit by bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from blockgate.errors import BlockgateError
from blockgate.gates import Gate, share_means
from blockgate.inspect import gate_losses, record_gates
from blockgate.lab.training.checkpoint import (
    BEST,
    LAST,
    check_resumable,
    load_checkpoint,
    save_checkpoint,
    start_from,
)
from blockgate.lab.training.config import Run, run_to_plain
from blockgate.lab.training.former import hook_state
from blockgate.lab.training.gate_health import GateWarnings, gate_facts, has_gates
from blockgate.lab.training.hooks import Hook, hooks_of
from blockgate.lab.training.launch import check_run, deferred_interrupt, launch, set_up
from blockgate.lab.training.logs import RunLog
from blockgate.lab.training.optimizer import LearningRate, make_optimizer
from blockgate.lab.training.shards import load_model, load_optimizer, model_state, optimizer_state, reshard, whole
from blockgate.lab.training.tasks import Share, make_task

__all__ = ["MakeHook", "train"]

# Makes a hook for a model, given how many updates an epoch has.
MakeHook = Callable[[nn.Module, int], Hook]

# Batches of validation on which the gates are counted: enough to tell, and cheap.
GATE_BATCHES = 20


def train(
    run: Run, *, hooks: Sequence[MakeHook] = (), notes: dict[str, Any] | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Trains a model, and returns its results on the validation and test data.

    The folder `run.output` gets last.pt (to resume from), best.pt (by validation), epochs.csv, TensorBoard curves,
    run.json (config and `notes`) and results.json.

    Args:
        run: what to do.
        hooks: makers of hooks beside those that the config asks for, such as a pruner.
        notes: facts to store with the config.
        quiet: show no progress.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once a checkpoint is written; a second one doesn't wait for it.
    """
    check_run(run)
    return _Training(run, hooks, notes or {}, quiet).go()


class _Training:
    """One run in one process. What a checkpoint holds is what `_state` lists."""

    def __init__(self, run: Run, hooks: Sequence[MakeHook], notes: dict[str, Any], quiet: bool) -> None:
        self.run = run
        self.fabric = launch(run)
        torch.manual_seed(run.seed)
        self.task = make_task(run, Share(self.fabric.global_rank, self.fabric.world_size))
        self.fingerprint = self.task.fingerprint()
        self.module = self.task.make_model()
        if run.start is not None:
            start_from(self.module, run.start)
        share_means(self.module)
        self.model = set_up(self.fabric, self.module)
        # After the model: sharding gives it other parameters.
        self.optimizer = make_optimizer(self.module, run.optimizer)
        self.stepper: Any = self.fabric.setup_optimizers(self.optimizer)
        self.learning_rate = LearningRate(run.schedule, run.epochs)
        updates = len(self.task.plan(0))
        self.hooks = [make(self.module, updates) for make in hooks]
        self.hooks += hooks_of(run, self.module, self.optimizer, updates)
        # Weights are equal in all processes, what is dropped is not.
        torch.manual_seed(run.seed + 1 + self.fabric.global_rank)
        self.epoch = self.index = self.updates = 0
        self.carried: Any = None
        self.sums: Tensor | None = None
        self.rows: list[dict[str, float]] = []
        # What the epoch took before this process went on with it: seconds, and those of the processor.
        self.spent = [0.0, 0.0]
        self.best = math.inf
        if run.resume:
            self._resume()
        self.log = RunLog(run.output if self.fabric.is_global_zero else None, first_update=self.updates, quiet=quiet)
        self.log.write_json("run.json", {"run": run_to_plain(run), "data_sha256": self.fingerprint, "notes": notes})
        self.gate_warnings = GateWarnings(reviving=bool(run.optimizer.revive))
        self.interrupted, self.saved_at = False, time.monotonic()

    def go(self) -> dict[str, Any]:
        """The rest of the run."""
        parameters = sum(p.numel() for p in self.module.parameters())
        self.log.say(f"{parameters:,} parameters; run in {self.run.output}")
        try:
            with deferred_interrupt(self._interrupt):
                while self.epoch < self.run.epochs:
                    self._train_epoch()
                return self._finish()
        finally:
            self.log.close()

    def _interrupt(self) -> None:
        self.interrupted = True

    def _train_epoch(self) -> None:
        """The updates of an epoch that are left, and its end."""
        plan = self.task.plan(self.epoch)
        self.log.begin_epoch(self.epoch + 1, self.run.epochs, self.index, len(plan))
        self.began = (time.perf_counter(), time.process_time())
        started, seen_before = self.began[0], 0.0 if self.sums is None else float(self.sums[-1])
        self.model.train()
        while self.index < len(plan):
            self._update(plan[self.index], len(plan))
            self.log.advance(self.index)
            if self.updates % self.run.log_every == 0:
                self.log.update(self.updates, self._facts(started, seen_before))
            # At the end of an epoch the checkpoint follows after validation.
            if self.index < len(plan):
                self._save_if_due()
        self._end_epoch(started, seen_before)

    def _update(self, batch: Any, batches: int) -> None:
        """One step of the optimizer."""
        factor = self.learning_rate.factor(self.epoch + self.index / batches) * self.task.lr_scale(batch)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        if self.run.balance:
            with gate_losses(self.module, shared=self.fabric.world_size > 1) as of_gates:
                step = self.task.learn(self.model, batch, self.carried, self.fabric.device)
            loss = step.loss + self.run.balance * of_gates.balance()
        else:
            step = self.task.learn(self.model, batch, self.carried, self.fabric.device)
            loss = step.loss
        self.fabric.backward(loss)
        if self.run.optimizer.clip is not None:
            self.fabric.clip_gradients(
                self.model, self.stepper, max_norm=self.run.optimizer.clip, error_if_nonfinite=False
            )
        self.stepper.step()
        for hook in self.hooks:
            hook.after_update()
        self.stepper.zero_grad()
        self.carried = step.carried
        self.sums = step.sums if self.sums is None else self.sums + step.sums
        self.index += 1
        self.updates += 1

    def _end_epoch(self, started: float, seen_before: float) -> None:
        """Validation, the best checkpoint, schedules, the next epoch's beginning, the last checkpoint."""
        self._check_finite()
        row: dict[str, float] = {"epoch": self.epoch + 1, "updates": self.updates}
        row |= {f"train_{name}": value for name, value in self._facts(started, seen_before).items()}
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.evaluation())
            valid = self._evaluate("valid")
            row |= {f"valid_{name}": value for name, value in valid.items()}
            score = valid[self.task.score]
            # Before a ramp has ended, a model is less sparse than the one that was asked for.
            settled = all(hook.settled for hook in self.hooks) or self.epoch + 1 == self.run.epochs
            row |= self._gate_health(settled)
            if settled and score < self.best:
                self.best = score
                self._save(BEST, {"epoch": self.epoch + 1, "valid": valid})
        reshard(self.module)
        changed = bool(self.rows) and self.rows[-1].get("train_sparsity") != row.get("train_sparsity")
        self.learning_rate.after_epoch(score, changed=changed)
        for hook in self.hooks:
            hook.after_epoch(score)
        row |= dict(zip(("seconds", "cpu_seconds"), (round(seconds, 1) for seconds in self._spent()), strict=True))
        self.rows.append(row)
        self.epoch, self.index, self.carried, self.sums, self.spent = self.epoch + 1, 0, None, None, [0.0, 0.0]
        self._save(LAST, {"training": self._state()})
        self.log.epoch(self.rows)
        if self._agree(self.interrupted) and self.epoch < self.run.epochs:
            raise KeyboardInterrupt

    def _spent(self) -> list[float]:
        """Seconds that this epoch has taken, in all processes that worked on it, and those of the processor."""
        wall, processor = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        return [self.spent[0] + wall, self.spent[1] + processor]

    def _finish(self) -> dict[str, Any]:
        """Tests the best model, not the last."""
        self.fabric.barrier()
        best = load_checkpoint(self.run.output / BEST)
        load_model(self.module, best["model"])
        results = {"epoch": best["epoch"], "valid": best["valid"], "test": self._evaluate("test")}
        self.log.write_json("results.json", results)
        test = "  ".join(f"{name} {value:.5g}" for name, value in results["test"].items())
        self.log.say(f"best model, of epoch {best['epoch']}, on the test data: {test}")
        return results

    def _facts(self, started: float, seen_before: float) -> dict[str, float]:
        """How this epoch goes so far."""
        assert self.sums is not None
        sums = self._total(self.sums)
        speed = (float(sums[-1]) - seen_before * self.fabric.world_size) / (time.perf_counter() - started)
        facts = self.task.metrics(sums) | {"lr": self.optimizer.param_groups[0]["lr"]}
        sparsity = self._sparsity()
        return facts | ({} if sparsity is None else {"sparsity": sparsity}) | {f"{self.task.unit}_per_second": speed}

    def _sparsity(self) -> float | None:
        """What a hook has set, or what gates have from the start."""
        of_hooks = [hook.sparsity for hook in self.hooks if hook.sparsity is not None]
        of_gates = [module.target_sparsity for module in self.module.modules() if isinstance(module, Gate)]
        return next(iter(of_hooks + of_gates), None)

    @torch.no_grad()
    def _evaluate(self, part: str) -> dict[str, float]:
        self.model.eval()
        return self.task.metrics(self._total(self.task.evaluate(self.model, part, self.fabric.device)))

    @torch.no_grad()
    def _gate_health(self, settled: bool) -> dict[str, float]:
        """Facts about the gates for a row; once sparsity has `settled`, warnings such as that they are frozen, too."""
        if not has_gates(self.module):
            return {}
        with record_gates(self.module, coactivation=False) as record:
            self.task.evaluate(self.model, "valid", self.fabric.device, GATE_BATCHES)
        if self.fabric.world_size > 1:
            record.gather()
        for warning in self.gate_warnings.new(record) if settled else ():
            self.log.say(f"warning: {warning}")
        return gate_facts(record)

    def _total(self, sums: Tensor) -> Tensor:
        """Sums over all processes."""
        if self.fabric.world_size == 1:
            return sums
        return cast("Tensor", self.fabric.all_reduce(sums.clone(), reduce_op="sum"))

    def _agree(self, wish: bool) -> bool:
        """Whether any process has the wish: all must stop, or save, after the same update."""
        if self.fabric.world_size == 1:
            return wish
        return bool(self._total(torch.tensor(float(wish), device=self.fabric.device)) > 0)

    def _save_if_due(self) -> None:
        due = time.monotonic() - self.saved_at >= self.run.checkpoint_seconds
        if self._agree(due or self.interrupted):
            self._save(LAST, {"training": self._state()})
            if self._agree(self.interrupted):
                raise KeyboardInterrupt

    def _save(self, name: str, more: dict[str, Any]) -> None:
        """Writes a checkpoint from the first process."""
        self._check_finite()
        weights = model_state(self.module)
        if self.fabric.is_global_zero:
            model = {"run": run_to_plain(self.run), "fingerprint": self.fingerprint, **self.task.model_facts()}
            save_checkpoint(self.run.output / name, model | {"model": weights} | more)
        self.saved_at = time.monotonic()

    def _check_finite(self) -> None:
        """Refuses to go on, and to overwrite a good checkpoint, once the loss is no number."""
        if self.sums is not None and not bool(self._total(self.sums).isfinite().all()):
            raise BlockgateError(
                f"training: expected a finite loss, got NaN or infinity by update {self.updates}. Lower the learning "
                f"rate or clip gradients; {self.run.output / LAST} holds the state before, if one was saved."
            )

    def _state(self) -> dict[str, Any]:
        """All that decides what comes next, beside the weights."""
        local: dict[str, Any] = {"random": torch.get_rng_state(), "carried": self.carried, "sums": self.sums}
        if self.fabric.device.type == "cuda":
            local["random_cuda"] = torch.cuda.get_rng_state(self.fabric.device)
        everyone: list[Any] = [local]
        if self.fabric.world_size > 1:
            everyone = [None] * self.fabric.world_size
            torch.distributed.all_gather_object(everyone, local)
        return {
            "processes": everyone,
            "optimizer": optimizer_state(self.module, self.optimizer),
            "learning_rate": self.learning_rate.state_dict(),
            "hooks": whole([hook.state_dict() for hook in self.hooks]),
            "epoch": self.epoch,
            "index": self.index,
            "updates": self.updates,
            "rows": self.rows,
            "best": self.best,
            "spent": self._spent() if self.index else [0.0, 0.0],
        }

    def _resume(self) -> None:
        """Takes up the last checkpoint; a run that was stopped before its first one starts again."""
        if not (self.run.output / LAST).is_file():
            return
        state = load_checkpoint(self.run.output / LAST)
        check_resumable(self.run, state, self.fingerprint, len(self.hooks))
        load_model(self.module, state["model"])
        training = state["training"]
        load_optimizer(self.module, self.optimizer, training["optimizer"])
        self.learning_rate.load_state_dict(training["learning_rate"])
        for hook, saved in zip(self.hooks, training["hooks"], strict=True):
            hook.load_state_dict(hook_state(hook, saved, self.module, state["model"]))
        for name in ("epoch", "index", "updates", "rows", "best"):
            setattr(self, name, training[name])
        self.spent = training.get("spent", self.spent)
        local = training["processes"][self.fabric.global_rank]
        carried = self.task.restore(self.module, local["carried"])
        self.carried, self.sums = self.fabric.to_device((carried, local["sums"]))
        torch.set_rng_state(local["random"])
        if self.fabric.device.type == "cuda":
            torch.cuda.set_rng_state(local["random_cuda"], self.fabric.device)

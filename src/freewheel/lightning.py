"""Lightning: one callback makes its Trainer one worker of a run.

    trainer = Trainer(max_epochs=3, devices=1, callbacks=[FreewheelCallback("adpsgd")])

Started by `freewheel run -n 4 train.py`, by torchrun, or alone. docs/ENGINES.md says what holds.
"""

import functools
import importlib
import math
import os
from typing import Any

import torch

from freewheel.api import attach
from freewheel.errors import ConfigError, NotInstalled
from freewheel.runtime.membership.place import local_rank
from freewheel.runtime.worker.guest import Guest, GuestCallback

try:
    try:
        lightning = importlib.import_module("lightning.pytorch")
    except ModuleNotFoundError:  # its other name
        lightning = importlib.import_module("pytorch_lightning")
except ModuleNotFoundError:
    raise NotInstalled("freewheel.lightning", "Lightning", "lightning") from None
from lightning_utilities.core.rank_zero import rank_zero_only


class FreewheelCallback(GuestCallback, lightning.Callback):  # type: ignore[misc, name-defined]
    """Trains with other workers while `Trainer.fit` runs."""

    resumes = "Trainer.fit ckpt_path"
    _position: dict[str, Any] | None = None
    _budget = -1

    def _say_ranks(self) -> None:
        rank_zero_only.rank = self._place.rank  # loggers write where it is 0

    # -- hooks, in the order in which they are called --

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        strategy, place = trainer.strategy, self._place
        if not hasattr(strategy, "guest"):
            if type(strategy).__name__ != "SingleDeviceStrategy":
                raise ConfigError(
                    f"the Trainer has chosen {type(strategy).__name__}, and workers are processes of their "
                    "own here. Give Trainer(devices=1) and no strategy."
                )
            strategy.__class__ = ranked(type(strategy))
        strategy.guest = self._guest
        strategy.global_rank, strategy.local_rank = place.rank, local_rank()
        strategy.world_size = place.world_size
        device = strategy.root_device
        if device.type == "cuda" and not device.index and torch.cuda.device_count() > 1:
            strategy._root_device = torch.device("cuda", local_rank() % torch.cuda.device_count())
            strategy.accelerator.setup_device(strategy._root_device)
        for one in trainer.callbacks:  # those before this one have asked already
            if place.rank and isinstance(one, lightning.callbacks.ProgressBar):
                one.disable()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._guest = Guest(attach(pl_module, trainer.optimizers, self._strategy, **self._settings))
        trainer.strategy.guest = self._guest
        self._budget = trainer.max_steps
        if self._deals:
            self._deal(trainer, self._guest)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A late worker learns from its first batch how far the others are."""
        self._catch_up(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        guest = self._inside
        self._catch_up(trainer, pl_module, after=True)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            guest.worker.report(loss)
        several = 1 if pl_module.automatic_optimization else len(trainer.optimizers)
        if self._budget != -1 and guest.steps(after=True) * several >= self._budget:
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step
        self._hear(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Also of an epoch that had no batch for this worker."""
        self._hear(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the others; the module then has the mean of all weights."""
        if trainer.should_stop and not self._inside.worker.stopped:
            self._inside.worker.stop()  # early stopping ends the run
        self._inside.leave(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._guest is not None:
            self._guest.fail(exception)

    # -- checkpoints --

    def state_dict(self) -> dict[str, Any]:
        """Where all workers are in the data; Lightning saves the rest."""
        return {"position": self._guest.position() if self._guest is not None else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._position = state_dict["position"]

    def _deal(self, trainer: Any, guest: Guest) -> None:
        fit = trainer.fit_loop
        combined, fetcher = fit._combined_loader, fit._data_fetcher
        several, reloads = len(combined.flattened) != 1, trainer.reload_dataloaders_every_n_epochs
        if several or reloads or not hasattr(fetcher, "prefetch_batches"):
            raise ConfigError(
                f"the Trainer has {len(combined.flattened)} training DataLoaders; one is dealt, for all "
                "epochs. Leave out reload_dataloaders_every_n_epochs and dataloader_iter, or give deal=False."
            )
        (given,) = combined.flattened
        whole, world_size = trainer.limit_train_batches == 1.0, guest.worker.world_size
        limit = None if whole else max(1, fit.max_batches // world_size)
        epochs = fit.max_epochs if fit.max_epochs > 0 and self._budget == -1 and whole else None
        passes = guest.deal(
            given,
            epochs=epochs,
            seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),  # of seed_everything, the same on all
            ahead=int(whole),  # it draws a batch before it trains on the last, to know which ends an epoch
            per_step=trainer.accumulate_grad_batches,
            position=self._position,
        )
        if self._position is None and trainer.current_epoch:  # a checkpoint of another run
            passes.loader.set_epoch(trainer.current_epoch)
        self._position = None
        combined.flattened, combined.limits = [passes], None if limit is None else [limit]
        fit.max_batches = limit or math.inf
        every = trainer.val_check_batch
        if every is not None and every != math.inf:
            whole = whole and trainer.val_check_interval == 1.0
            trainer.val_check_batch = math.inf if whole else max(1, int(every) // world_size)
        self._skip(trainer, guest.seek())
        fetcher.setup(combined)
        if not trainer.current_epoch or fit.is_resuming or fit.epoch_loop.restarting:
            iter(fetcher)  # else the epoch does, as it begins

    def _skip(self, trainer: Any, over: int) -> None:
        """A late worker: count as over the epochs of which the others have left it nothing."""
        for count in (trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_progress.total):
            for name in ("ready", "started", "processed", "completed"):
                setattr(count, name, getattr(count, name) + over)
        for config in trainer.lr_scheduler_configs:
            if config.interval == "epoch" and not config.reduce_on_plateau:
                for _ in range(over // config.frequency):
                    trainer.lightning_module.lr_scheduler_step(config.scheduler, None)

    def _catch_up(self, trainer: Any, pl_module: Any, after: bool = False) -> None:
        if not pl_module.automatic_optimization:
            return  # then the module steps its schedulers
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                scheduler = config.scheduler
                step = functools.partial(pl_module.lr_scheduler_step, scheduler, None)
                self._inside.catch_up(scheduler, config.frequency, step, after)

    def _hear(self, trainer: Any) -> None:
        if self._inside.worker.stopped:
            trainer.should_stop = True
        if self._inside.worker._leaving.asked:  # it leaves when it comes for its next batch, not here
            trainer._signal_connector.received_sigterm = False


def ranked(base: Any) -> Any:
    """The strategy of one device for one of several workers, each with a device of its own."""

    class FreewheelStrategy(base):  # type: ignore[misc]
        """Knows its rank, and what a checkpoint has to hold."""

        guest: Guest | None = None

        @property
        def is_global_zero(self) -> bool:
            return bool(self.global_rank == 0)

        def lightning_module_state_dict(self) -> dict[str, Any]:
            """A checkpoint has the mean of all workers' weights."""
            if self.guest is not None and self.guest.inside and self.is_global_zero:
                return self.guest.worker.consensus().state_dict()
            own: dict[str, Any] = super().lightning_module_state_dict()
            return own

    return FreewheelStrategy

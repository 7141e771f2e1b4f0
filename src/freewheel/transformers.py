"""Hugging Face Transformers: one callback makes its Trainer one worker of a run.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[FreewheelCallback("adpsgd")])

Importing this hides the ranks that a launcher has set (RANK, WORLD_SIZE, LOCAL_RANK) from Accelerate, which
would start DDP, and lets the process see one GPU. So import it before TrainingArguments or an Accelerator is
made. docs/ENGINES.md says what holds.
"""

import logging
import os
from pathlib import Path
from typing import Any

import torch

from freewheel.api import attach
from freewheel.errors import ConfigError, NotInstalled
from freewheel.runtime.membership.place import hide, local_rank
from freewheel.runtime.worker.guest import Guest, GuestCallback, one_gpu

try:
    from accelerate.state import PartialState
    from transformers.trainer_callback import TrainerCallback
except ModuleNotFoundError:
    raise NotInstalled("freewheel.transformers", "Transformers with Accelerate", "transformers") from None

log = logging.getLogger("freewheel")
POSITION = "freewheel"  # under which a checkpoint's trainer_state.json has where all workers are in the data

one_gpu()
hide(os.environ)


class FreewheelCallback(GuestCallback, TrainerCallback):  # type: ignore[misc]
    """Trains with other workers while `Trainer.train` runs."""

    resumes = "Trainer.train resume_from_checkpoint"

    # -- hooks, in the order in which they are called --

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        found = args.distributed_state
        if args.parallel_mode.value != "not_parallel" or found.num_processes > 1:
            raise ConfigError(
                f"the Trainer runs in mode {args.parallel_mode.value!r}, and Freewheel's workers have one "
                "device each. Import freewheel.transformers before TrainingArguments is made."
            )
        if args.auto_find_batch_size:
            raise ConfigError(
                "auto_find_batch_size would begin the run again on one worker. Leave it out, and set "
                "per_device_train_batch_size."
            )
        self._say_ranks()
        args.ignore_data_skip = True  # where to go on is in the checkpoint, for all workers
        state.is_world_process_zero = self._place.rank == 0
        state.is_local_process_zero = local_rank() == 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        plateau = isinstance(given["lr_scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau)
        if plateau and self._place.world_size > 1:
            raise ConfigError(
                "reduce_lr_on_plateau needs evaluations, which one worker makes. Take another "
                "lr_scheduler_type."
            )
        worker = attach(given["model"], given["optimizer"], self._strategy, **self._settings)
        self._guest = guest = Guest(worker)
        if self._deals:
            try:
                self._deal(guest, args, state, given["train_dataloader"])
            except BaseException as error:  # nobody else would say that this worker leaves
                guest.fail(error)
                raise
            control.should_training_stop = guest.passes is not None and guest.passes.over

    def on_step_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any, **given: Any) -> None:
        """A late worker learns from its first batch how far the others are."""
        self._inside.catch_up(lr_scheduler, 1, lr_scheduler.step)

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any, **given: Any) -> None:
        guest = self._inside
        guest.catch_up(lr_scheduler, 1, lr_scheduler.step, after=True)
        if guest.steps(after=True) >= state.max_steps or guest.worker.stopped:
            control.should_training_stop = True
        self._one_writes(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The Trainer takes a pass that has no batch for this worker for the end of all data."""
        guest = self._inside
        if guest.passes is not None:
            none = not guest.passes.loader.given
            if control.should_epoch_stop:
                guest.passes.close()
            over = guest.passes.over or guest.worker.stopped
            control.should_training_stop = over or (control.should_training_stop and not none)
        self._one_writes(state, control)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        guest = self._inside
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if guest.inside and self._place.rank == 0 and folder.is_dir():
            save(guest.worker.consensus(), folder)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **given: Any) -> None:
        """The last one of training comes before the best checkpoint is loaded: leave there."""
        if "loss" in logs and self._guest is not None and self._guest.inside:
            self._guest.worker.report(logs["loss"])
        if "train_runtime" in logs:
            self._leave(state, control, given["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **given: Any) -> None:
        """Wait for the others; the model then has the mean of all weights, and worker 0 writes it."""
        self._leave(state, control, model)
        if self._place.rank == 0 and args.save_strategy.value != "no":
            save(model, Path(args.output_dir))

    def _deal(self, guest: Guest, args: Any, state: Any, train_dataloader: Any) -> None:
        epochs = int(args.num_train_epochs)
        whole = args.max_steps <= 0 and epochs == args.num_train_epochs
        per_step = args.gradient_accumulation_steps
        if not hasattr(train_dataloader, "base_dataloader"):
            raise ConfigError(
                f"get_train_dataloader gives a {type(train_dataloader).__name__} that Accelerate has not "
                "prepared: it cannot be dealt. Prepare it, or give deal=False and share the data out."
            )
        train_dataloader.base_dataloader = guest.deal(
            train_dataloader.base_dataloader,
            epochs=epochs if whole else None,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            ahead=per_step,  # a step's batches at once; Accelerate draws one more
            per_step=per_step,
            bounded=True,
            position=state.stateful_callbacks.get(POSITION),
        )
        guest.seek()

    def _leave(self, state: Any, control: Any, model: Any) -> None:
        guest = self._inside
        if not guest.inside:
            return
        over = guest.worker.stopped or (guest.passes is not None and guest.passes.over)
        if not over and guest.steps(after=True) < state.max_steps:
            if control.should_training_stop:
                guest.worker.stop()  # early stopping ends the run
            elif guest.passes is not None:
                log.warning("the Trainer has made all its epochs; what is left of the data others may use")
        guest.leave(model)

    def _one_writes(self, state: Any, control: Any) -> None:
        """Only worker 0 evaluates and writes checkpoints."""
        if self._place.rank:
            control.should_evaluate = control.should_save = False
        elif control.should_save:
            state.stateful_callbacks[POSITION] = self._inside.position()

    def _say_ranks(self) -> None:
        """Tell Accelerate which worker this is: it lets only the first one log and write."""
        if PartialState._shared_state:
            known = PartialState()
            known.process_index, known.local_process_index = self._place.rank, local_rank()


def save(model: Any, folder: Path) -> None:
    """Write a model as `Trainer.save_model` does."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
        return
    from safetensors.torch import save_model

    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})

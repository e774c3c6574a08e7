"""The training loop and the models it drives. `fastrl.trainer.loop` is the page to read first."""

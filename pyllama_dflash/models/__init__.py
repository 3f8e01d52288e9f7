"""Models: hyper-parameters, weights and graphs of the target (`qwen35`) and the draft (`dflash`)."""

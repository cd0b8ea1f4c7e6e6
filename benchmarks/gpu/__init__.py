"""Everything that only a GPU can show, in one command: `make gpu-check` (docs/gpus.md).

    __main__.py   run, pack, unpack
    runner.py     items, each in a child process with a time limit; result.json and the table
    findings.py   what an item found, written as it goes, so that an item that is ended keeps its figures
    models.py     random-init Qwen3 models, batches and configurations
    learner.py    ceilings of the GPU; log-probs and gradients against float64; Updater.run
    weights.py    publish, checkpoint, resume
    engine.py     vLLM: start, log-prob parity, update under load, tokens/s
    whole_run.py  the demo with two kills; our grpo against TRL
    pack.py       what a machine without network needs, within a byte limit

runner.py, findings.py and pack.py use the standard library only: they start where nothing is installed yet.
"""

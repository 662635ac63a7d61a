def test_speed(perf, gpus):
    perf.script(f"accelerate launch --num_processes {gpus} train.py", cwd="examples/accelerate_loop")

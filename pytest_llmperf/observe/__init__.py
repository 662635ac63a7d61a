"""What a rank observes of a training, whoever wrote it; driven by plain calls, of a trainer's callbacks or of hooks.

``training`` is what is called as steps, passes and batches begin and end. It fills a ``measurement`` by clocks and
counters, a GPU's by ``device`` (which alone names CUDA), decides when enough steps are timed, and goes on to steps that
are traced (``tracer``). Before them ``calibration``, beside them ``vital_signs``, around them ``environment``. May
import ``records`` and ``support``; knows no trainer and no worker."""

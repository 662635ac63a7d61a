# Needs python3 (3.10 or newer, with venv), git and make. Everything else goes into .bootstrap/ and .tox/.
#   make test    all tests, once
#   make test-wide    what takes minutes and each commit need not show: all model types of transformers, other Pythons, ...
#   make lint    ruff, mypy, import contracts         (make format rewrites what ruff can)
#   make docs    the documentation as a site, in build/docs/html     (make docs LINKS=1 asks for what it links to, too)
#   make demo    the ladder with tiny models on the CPU: recorded, then judged
#   make gpu     the suite on this machine's GPUs      make gpu ARGS="-k liger --gpus 1"
#   make clean   forget the environments
# ARGS goes to pytest. PYTHON names the interpreter; 3.11 is the one the pinned versions were tried on.

PYTHON := $(shell for python in python3.11 python3; do \
	$$python -c 'import ensurepip, venv' >/dev/null 2>&1 && echo $$python && exit; done; echo python3)
# Interpreters that pyenv keeps but has not activated are found too.
PYENV_PYTHONS := $(wildcard $(PYENV_ROOT)/versions/3.1[0-9].*/bin/python3)
DISCOVER := $(if $(PYENV_PYTHONS),--discover $(PYENV_PYTHONS))
TOX := .bootstrap/bin/python -m tox run $(DISCOVER)
# What waits (SLURM, torch's download) beside what computes: two at a time, in the order of their names there.
TOX_TWO := .bootstrap/bin/python -m tox run-parallel $(DISCOVER) --parallel 2 --parallel-no-spinner
ARGS :=

.PHONY: test test-wide lint format docs demo gpu clean

test: .bootstrap/ready
	$(TOX_TWO) -e full,lean $(if $(ARGS),-- $(ARGS))

test-wide: .bootstrap/ready
	$(TOX) -e wide,floor,py312,oldest $(if $(ARGS),-- $(ARGS))

lint: .bootstrap/ready
	$(TOX) -e lint

format: .bootstrap/ready
	$(TOX) -e format

docs: .bootstrap/ready
	$(TOX) -e $(if $(LINKS),links,docs) -- $(ARGS)

demo: .bootstrap/ready
	$(TOX) -e demo -- $(ARGS)

gpu: .bootstrap/ready
	$(TOX) -e gpu -- $(ARGS)

clean:
	rm -rf .bootstrap .tox .mypy_cache .ruff_cache .import_linter_cache .pytest_cache build dist

.bootstrap/ready: constraints.txt tools/bootstrap.py
	$(PYTHON) tools/bootstrap.py
	touch $@

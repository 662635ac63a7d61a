"""The twin of each setting by the same file name: it applies the setting to a Trainer's training and witnesses it.

``worker/build.py`` lists what they apply, ``worker/evidence.py`` who witnesses.
"""

"""Settings of all verbs: declared once, read, merged with their sources, checked. No torch.

Start reading in ``load.py``, which builds the settings of a command. In the order in which a setting passes them:

1. ``schema/``: each setting with its type, default, help and rules. A new setting is one field there.
2. ``words/``, which are not ours: ``aliases.py`` rewrites a command line by the flags of ``spellings.py``, ``paddle.py`` the
   commands of PaddleDetection; ``earlier.py`` has the settings of earlier versions, ``unknown.py`` hints for others' words.
3. ``resolve.py`` merges the layers, ``recipe.py`` the hyperparameters, and ``decide.py`` says what a run does with both.
4. ``checks.py`` refuses what cannot work together; ``loggers.py``, ``transforms.py`` and ``user_code.py`` check one setting each.
5. ``stored/``: ``job.py`` writes and reads ``config.yaml``; ``resume.py`` and ``resume_study.py`` merge it with a new command.

It imports ``support``, and the list of families.
"""

"""The machines of a run: what they are, how processes start there, what happens after a failure. No torch.

It imports ``training`` and the rooms before it. Start reading in ``launch/plan.py``; after a failure ``launch/next_action.py`` decides.
``resources.py`` says what a run needs of a machine, and ``strict.py`` checks what a host sends.
"""

"""The settings that a run or a study stores, and how a resumed one merges them with a new command."""

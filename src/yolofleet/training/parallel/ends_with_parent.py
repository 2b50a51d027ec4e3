"""Imported first by the fork server of workers: it ends with the agent, also in the middle of loading torch."""

from yolofleet.support.system.children import die_with_parent

die_with_parent()

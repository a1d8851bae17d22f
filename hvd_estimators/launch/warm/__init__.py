"""Warm start: ranks are forked from processes that have imported a framework."""

"""Rollouts from SGLang servers over HTTP."""

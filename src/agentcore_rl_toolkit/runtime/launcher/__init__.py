"""Starts session processes: a template process per agent, forked once per session."""

TEMPLATE_MODULE = "runtime.template.process"  # as it stands in a template's command line

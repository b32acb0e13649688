"""Strategies by name: the hooks, the plug-ins that implement them, and what a spec string stands for."""

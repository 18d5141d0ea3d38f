"""Know the machine: device identity, step latencies, and when a machine is idle enough to measure.

Nothing here knows a model or a database. A step to be timed comes in as a callable, measured points go out as values;
`treeopt.app` joins the two. Importing this package loads neither torch nor psutil.
"""

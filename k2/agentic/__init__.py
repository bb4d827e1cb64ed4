"""Agentic data in the report's three stages (section 3.1.1): tool specifications, agents with rubric tasks, judged trajectories.

tools         real (real.py, a running MCP server) and evolved (evolve.py: category -> application -> tool)
tasks         agents, users and rubrics (tasks.py)
trajectories  the user, the policy (policy.py), the tool simulator (simulator.py) and the judge (judge.py), put together in
              trajectories.py: large-scale rejection sampling
"""

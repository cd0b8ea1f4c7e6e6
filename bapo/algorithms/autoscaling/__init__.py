"""How many rollout workers a run needs: settings and the rule. Pure: the rollout server measures and acts."""

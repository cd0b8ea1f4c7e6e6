"""PPO with a critic (`contrib/gae`), and BA-PPO (appendix A.9 of the paper)."""

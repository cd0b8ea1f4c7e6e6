"""PPO with a critic, and BA-PPO (appendix A.9 of the paper)."""

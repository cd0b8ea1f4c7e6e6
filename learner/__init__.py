"""The learner: Algorithm 1 without the sampling. Every process reads its losses' settings: no import of torch here."""

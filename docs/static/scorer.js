// How the search orders pages: names and titles as Sphinx does, then guides before notebooks and
// measurements, and the pages that have every recipe and every config key before other guides.
var Scorer = {
  score: ([page, , , , score]) => {
    if (page === "docs/recipes") return score + 4;
    if (page === "docs/config_keys") return score + 3;
    return /^docs\/(results|benchmarks)\/|^colabs\/|^CHANGELOG/.test(page) ? score - 2 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

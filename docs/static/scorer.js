// How the search orders pages: names and titles as Sphinx does, then guides before measurements,
// and the page of recipes, which names every one of them, before other guides.
var Scorer = {
  score: ([page, , , , score]) => {
    if (page === "docs/recipes") return score + 4;
    return /^docs\/(results|benchmarks)\/|^CHANGELOG/.test(page) ? score - 2 : score;
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

// What was drafted and what was kept. The terms are those of the server's own statistics.

/** Counts over the rounds of one answer, or of several. */
export class Tally {
  numRounds = 0;
  numTokens = 0;
  numDrafted = 0;
  numStalls = 0;
  byPosition = []; // {tried, kept}: how often a draft stood there, and how often it was kept
  byKind = new Map(); // kind of text -> {tried, kept}

  /** Count a round; the one of the prompt is none. */
  add(round) {
    this.numRounds += 1;
    this.numTokens += round.tokens.length;
    this.numDrafted += round.num_drafted;
    this.numStalls += round.follows_stall;
    for (let i = 0; i < round.num_drafted; i += 1) {
      this.byPosition[i] ??= { tried: 0, kept: 0 };
      this.byPosition[i].tried += 1;
      this.byPosition[i].kept += i < round.num_accepted;
    }
  }

  /** Count the kinds of the tokens of all rounds, which are known at the end of an answer.
   *  A rejected draft counts for the kind of the token that the target put in its place. */
  addKinds(rounds, kinds) {
    let start = 0;
    for (const round of rounds) {
      const numKept = round.num_accepted;
      round.tokens.forEach((_, i) => {
        const isRejection = i === numKept && i < round.num_drafted;
        if (i < numKept || isRejection) this.#countKind(kinds[start + i], i < numKept);
      });
      start += round.tokens.length;
    }
  }

  #countKind(kind, isKept) {
    if (!this.byKind.has(kind)) this.byKind.set(kind, { tried: 0, kept: 0 });
    const counts = this.byKind.get(kind);
    counts.tried += 1;
    counts.kept += isKept;
  }

  /** Add the counts of another answer. */
  merge(other) {
    this.numRounds += other.numRounds;
    this.numTokens += other.numTokens;
    this.numDrafted += other.numDrafted;
    this.numStalls += other.numStalls;
    other.byPosition.forEach((counts, i) => {
      this.byPosition[i] = plus(this.byPosition[i], counts);
    });
    for (const [kind, counts] of other.byKind) {
      this.byKind.set(kind, plus(this.byKind.get(kind), counts));
    }
  }

  /** tau: tokens a round. */
  get acceptanceLength() {
    return this.numRounds ? this.numTokens / this.numRounds : null;
  }

  /** Drafted tokens a round. */
  get depth() {
    return this.numRounds ? this.numDrafted / this.numRounds : null;
  }
}

function plus(sum, counts) {
  return { tried: (sum?.tried ?? 0) + counts.tried, kept: (sum?.kept ?? 0) + counts.kept };
}

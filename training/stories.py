"""Short stories from a small grammar: a hero, a friend, a place, one arc from a trouble to a good end.

A template is English with `[this|or that]` choices, which may nest, and `{slots}`. A slot has one value per story, so
that the fox of the first sentence is the fox of the last one.
"""

import re

GIRLS = """Lily Mia Anna Emma Rosa Nina Clara Ella Zoe Ruby Daisy Molly Lucy Hana Ivy Tilda Greta Olive Poppy Luna \
Stella Nora
Alice Maya Sofia Ada June Pearl Hazel Wendy Freya Amina Leila Yuki Elsa Martha Penny Flora""".split()
BOYS = """Tom Ben Max Leo Sam Finn Oscar Hugo Milo Felix Jack Otto Theo Noah Toby Gus Henry Paul Rusty Bruno Jasper \
Arlo Ned
Omar Ravi Kenji Pablo Luca Emil Anton Charlie Oliver Simon Peter Victor Walter Barney Pip""".split()
ANIMALS = """fox bear rabbit mouse cat dog owl hedgehog squirrel turtle frog duck hen goat lamb pony deer otter \
beaver badger
mole bird sparrow penguin seal elephant lion tiger monkey giraffe kitten puppy pig donkey wolf raccoon koala panda camel
goose swan crow snail crab lizard""".split()
CREATURES = "dragon robot unicorn giant elf wizard ghost troll".split()
PEOPLE = {
    "f": "girl princess queen witch baker farmer sailor painter gardener teacher".split(),
    "m": "boy prince king pirate baker farmer sailor painter knight shepherd".split(),
}
TRAITS = "little small young kind shy brave clever cheerful curious quiet friendly gentle lonely".split()
PLACES = [
    "the forest", "the meadow", "the village", "the river", "the lake", "the garden", "the hill", "the old mill",
    "the beach", "the market", "the valley", "the big oak tree", "the pond", "the harbour", "the castle", "the orchard",
    "the bridge",
]  # fmt: skip
HOMES = [
    "a small house by the river", "a cosy hole under an old oak tree", "a little cottage at the edge of the forest",
    "a warm den on a green hill", "a tiny hut near the sea", "a house with a red roof",
    "a wooden cabin in the mountains", "a quiet village between two hills", "an old boat on the lake",
    "a small farmhouse in a wide valley", "a tower with a blue door",
]  # fmt: skip
THINGS = """hat scarf ball kite key ring drum book lantern basket button boot bell whistle map mitten spoon necklace cup
coat""".split()
COLOURS = "red blue green yellow orange purple white golden silver brown black pink".split()
FOODS = "bread apples berries cheese cake pears nuts carrots pancakes cookies plums cherries muffins".split()
SKILLS = [
    ("swim", "swimming"), ("fly a kite", "flying a kite"), ("bake bread", "baking bread"), ("whistle", "whistling"),
    ("dance", "dancing"), ("read", "reading"), ("ride a bike", "riding a bike"), ("sing", "singing"),
    ("paint", "painting"), ("play the drum", "playing the drum"), ("climb trees", "climbing trees"),
    ("skate", "skating"), ("juggle", "juggling"),
]  # fmt: skip
FEARS = ["the dark", "thunder", "deep water", "high places", "loud noises", "big dogs", "the wind", "strangers"]
PLANTS = ["sunflower", "pumpkin", "rose bush", "tomato plant", "strawberry plant", "tulip", "apple tree", "cherry tree"]

OPENINGS = [
    "Once upon a time, there was a {trait} {kind} named {hero}. {He} lived in {home}.",
    "Once upon a time, a {trait} {kind} named {hero} lived in {home}.",
    "Once upon a time, in {home}, there lived a {trait} {kind}. {His} name was {hero}.",
    "There was once a {trait} {kind} whose name was {hero}. {He} lived in {home}.",
    "{hero} was a {trait} {kind} who lived in {home}.",
    "Long ago, a {trait} {kind} called {hero} lived in {home}.",
]

# One arc: what a reader may ask for, and the body after the opening.
ARCS = {
    "lost": (
        ["a lost {thing}", "a {kind} who lost {his} {thing}", "a {colour} {thing}"],
        """
{hero} had a {colour} {thing} and [loved it very much|took it everywhere|was very proud of it]. [One morning|One \
day|One windy day], the {thing} was gone! [{hero} felt very sad.|"Oh no!" cried {hero}. "Where is my {thing}?"]

[First|At first] {he} looked under the bed, but it was not there. Then {he} [went to|ran to|walked to] {place}, but \
[there was no {thing}|it was not there either|{he} found only [leaves|stones|an old shoe]]. {He} [sat down and \
sighed|began to cry|did not know what to do]. Just then {his} friend {friend} the {fkind} came by. ["What is \
wrong?"|"Why are you so sad?"] asked {friend}. ["I have lost my {colour} {thing},"|"I cannot find my {thing},"] said \
{hero}.

[{friend} thought for a moment.|{friend} smiled.] ["Let us look together,"|"I will help you,"|"Two can search better \
than one,"] {fhe} said. They looked [behind the bushes|under the stones|in the tall grass] and near {place2}. [At \
last|Suddenly|After a long time], {friend} saw something {colour}. It was the {thing}! [The wind had carried it \
there.|A little bird had used it as a bed.|It had fallen there the day before.] {hero} [hugged {friend}|jumped for \
joy|was so happy] and said, ["Thank you! You are a true friend."|"Thank you, {friend}!"] [From that day on, {he} \
always took good care of {his} {thing}.|Then they went home together and [ate {food}|had tea].]""",
    ),
    "learn": (
        ["learning to {skill}", "a {kind} who wanted to {skill}", "{a_kind} who learns to {skill}"],
        """
More than anything, {hero} wanted to {skill}. But every time {he} tried, [something went wrong|it did not work|the \
others laughed]. ["I will never learn it,"|"It is too hard,"] {he} said [sadly|with a sigh].

One day {he} met {friend}, a {ftrait} {fkind} who was very good at {skilling}. ["Can you teach me?"|"Will you show me\
 how?"] asked {hero}. ["Of course,"|"Yes, with pleasure,"] said {friend}. ["But you must be patient."|"But you must \
try every day."] So they met every [morning|evening|afternoon] near {place}. The first day was [hard|very hard]. The \
second day was a little better. {hero} [fell down|made many mistakes], but {he} [always got up again|never gave up].

[After a week|After many days|One bright morning], it happened: {hero} could {skill}! [Everyone clapped and \
cheered.|{friend} clapped and laughed with joy.] ["You did it!"|"I knew you could do it!"] said {friend}. {hero} \
[smiled from ear to ear|was very proud]. {He} had learned that [practice makes perfect|hard things become easy when \
you keep trying|a good friend and a little patience can do wonders].""",
    ),
    "share": (
        ["sharing {food}", "a hungry {fkind}", "{a_kind} who shares {his} food"],
        """
One [cold|rainy|sunny] day, {hero} found [a basket full of|a lot of] {food} near {place}. ["What luck!"|"How \
wonderful!"] {he} said. ["Now I will have enough for the whole week."|"I will eat it all by myself."]

On the way home {he} met a {ftrait} {fkind} named {friend}. {friend} looked [tired and hungry|very hungry|thin and \
cold]. ["I have not eaten since yesterday,"|"Please, do you have something to eat?"] said {friend} [softly|in a low \
voice]. {hero} looked at the {food}. {He} thought [for a moment|about it]. Then {he} [smiled|nodded] and said, \
["There is enough for two."|"Sit down with me. We will share."] They sat [under a tree|on a big stone|by the path] \
and ate together, and [the {food} had never tasted so good|they talked and laughed until the sun went down].

[Some weeks later|When winter came], {hero} had nothing left to eat. There was a knock at the door. It was {friend}, \
with [a big basket of|a bag full of] {food2}! ["You helped me, and now I help you,"|"Today it is my turn to share,"] \
said {friend}. [From then on they were the best of friends.|And so {hero} learned that kindness always comes \
back.]""",
    ),
    "storm": (
        ["a storm", "a {kind} in a storm", "getting lost in the forest"],
        """
One [afternoon|day] {hero} went to {place} to [pick berries|look for shells|gather wood|visit {his} grandmother]. \
[{He} walked and walked|{He} was so busy that {he} did not see the dark clouds]. Suddenly the wind began to \
[blow|howl] and the rain [came down hard|poured from the sky]. {hero} wanted to go home, but {he} [could not see the \
path|did not know the way]. ["I am lost,"|"Oh dear, where am I?"] {he} whispered.

Then {he} saw a [small|warm|yellow] light between the trees. It came from a little window. {hero} knocked, and an old\
 {fkind} opened the door. ["Come in, you are all wet!"|"Come in quickly, little one!"] said the {fkind}, whose name \
was {friend}. {friend} gave {him} [a warm blanket|a dry coat] and a bowl of hot [soup|milk|porridge]. They sat by the\
 fire and [told each other stories|listened to the rain] until the storm was over.

In the morning the sky was [blue|clear] again. {friend} [showed {him} the way home|walked with {him} to the edge of \
the forest]. ["Come back soon,"|"You are always welcome here,"] {fhe} said. {hero} [waved|thanked {fhim}] and ran \
home. [Since then, {he} has visited {friend} every Sunday.|{He} never forgot the light in the window.]""",
    ),
    "fear": (
        ["a {kind} who was afraid of {fear}", "being brave", "fear"],
        """
{hero} was [not afraid of many things|happy most of the time], but {he} was afraid of {fear}. [{He} never told anyone\
 about it.|The others sometimes laughed at {him} for it.]

One [night|evening|day], {hero} heard a [small|weak] voice calling from {place}. "Help! Help!" It was {friend} the \
{fkind}, whose foot was stuck between two [stones|roots]. To get there, {hero} had to be very brave, for there was \
nothing that frightened {him} more than {fear}. {His} [heart beat fast|knees shook]. ["I am afraid,"|"I cannot do \
it,"] {he} thought. ["But my friend needs me."|"But {friend} needs my help."] {He} took a deep breath and went [on, \
step by step|straight ahead].

When {he} reached {friend}, {he} pulled and pulled until the foot was free. ["You saved me!"|"How brave you are!"] \
said {friend}. {hero} [looked around|laughed]. [{He} had forgotten to be afraid.|It was not so bad after all.] ["To \
be brave does not mean that you have no fear,"|"Being brave means going on even when you are afraid,"] said {friend} \
[on the way home|with a smile]. And that night {hero} slept very well.""",
    ),
    "gift": (
        ["a birthday", "a birthday gift", "a present for a friend"],
        """
It was almost the birthday of {his} best friend, {friend} the {fkind}. {hero} wanted to give {fhim} something \
special, but {he} had no money. ["What can I do?"|"What could I give?"] {he} [wondered|asked {himself}].

{He} went to {place} and looked around. There {he} found [some pretty shells|colourful leaves|smooth round \
stones|soft feathers]. [All day long|The whole evening] {hero} worked [with glue and string|by the light of a \
candle]. {He} made a [beautiful|lovely] {colour} {thing}. It was [a little crooked|not perfect], but it was made with\
 love.

The next day there was a big party with {food} and music. Many guests brought [big|expensive] presents. {hero} [felt \
shy|was a little nervous] and gave {friend} the {thing} last of all. {friend} opened it slowly, and {fhis} eyes [grew\
 wide|began to shine]. ["You made this for me?"|"Did you make this yourself?"] {fhe} asked. ["This is the best \
present of all!"|"I have never had anything so beautiful!"] {friend} [hugged {him}|gave {him} a big hug], and they \
[danced|sang and played] until the stars came out.""",
    ),
    "rescue": (
        ["a {kind} who helped a bee", "helping others", "a small creature that needed help"],
        """
One day, {hero} was walking near {place} when {he} saw a [tiny|little] [bee|beetle|ant|butterfly|ladybird] that had \
fallen into [a puddle|the water]. ["Hold on!"|"Wait, I will help you!"] said {hero}. {He} held out a \
[leaf|stick|blade of grass], and the little creature climbed onto it. ["Thank you,"|"You saved my life,"] it said. \
["One day I will help you too."|"I will not forget this."] {hero} [laughed kindly|smiled]. "You are so small. How \
could you help me?"

[Not long after|A few days later], {hero} [lost {his} way|fell asleep] [near|not far from] {place2}. When {he} \
[looked up|woke up], it was dark, and {he} did not know where to go. Then {he} heard a [soft|tiny] voice at {his} \
ear. It was the little creature! ["Follow me,"|"Come with me,"] it said. "I know every path here." It had brought its\
 whole family, and they [showed {him} the way|led {him} home], through the [tall grass|dark trees] and over the \
[bridge|hill].

When {hero} was home again, {he} said, ["Thank you, little friend. You are small, but your heart is big."|"I was \
wrong. Even the smallest friend can be a great help."] And from that day on, {hero} [was kind to everyone, great or \
small|never again laughed at anyone who was small].""",
    ),
    "treasure": (
        ["a treasure", "a secret map", "a mysterious box", "an adventure"],
        """
One [day|rainy morning|evening], {hero} found an old [map|letter] [under the floor|in a dusty book|in a bottle]. On \
it there was a big {colour} cross. ["A treasure!"|"It must be a treasure map!"] {he} said. {He} ran to {his} friend \
{friend} the {fkind}. ["Will you come with me?"|"Let us find it together!"] {he} asked, and {friend} said yes at \
once.

They packed [some {food}|a bag with {food}] and set off. First they crossed {place}. Then they had to [climb over a \
high wall|cross a shaky bridge|walk through a dark tunnel]. ["I am tired,"|"It is so far,"] said {friend}. ["Only a \
little more,"|"We are almost there,"] said {hero}, and {he} took {fhis} hand. At last they came to {place2}, and \
there, [behind a big stone|under an old tree], they began to dig. Soon they hit something hard. It was a \
[wooden|rusty] box!

[With trembling hands they opened it.|Slowly they opened the lid.] There was no gold in it, only [an old photograph \
of two friends|a small {thing} and a letter]. ["The greatest treasure is a good friend,"|"Whoever finds this with a \
friend is already rich,"] it said inside the lid. {hero} and {friend} looked at each other and [laughed|smiled]. They\
 [ate their {food}|sat down in the sun] and agreed that it had been the best day of the whole year.""",
    ),
    "quarrel": (
        ["two friends", "{a_kind} and {a_fkind}", "a quarrel", "saying sorry"],
        """
{His} best friend was {friend}, a {ftrait} {fkind}. They played together every day near {place}. But one day they \
both wanted the same {colour} {thing}. ["It is mine!"|"I saw it first!"] said {hero}. ["No, it is mine!"|"No, I saw \
it first!"] said {friend}. They pulled and pulled, and then the {thing} [broke in two|fell into the mud]. [Both of \
them were angry|They were both very angry], and they went home without a word.

The next day {hero} sat alone. {He} tried to play, but [it was no fun without {friend}|nothing was any fun]. ["I miss\
 my friend,"|"A {thing} is not worth a friend,"] {he} thought. So {he} [took some {food}|picked some flowers] and \
[walked|went] to the house of {friend}. On the way {he} met {friend}, who was coming to see {him}!

["I am sorry,"|"I am so sorry,"] said both of them at the same time, and then they [laughed|had to laugh]. Together \
they [mended the {thing}|cleaned the {thing}], and now it belonged to both of them. [They took turns, one day \
each.|They shared it every day.] And they never [quarrelled about such a small thing again|forgot that a friend is \
worth more than a {thing}].""",
    ),
    "plant": (
        ["a garden", "a seed", "a {plant}", "being patient"],
        """
One spring day, {friend} the {fkind} gave {him} a tiny seed. ["Plant it and take care of it,"|"Put it in the ground \
and be patient,"] said {friend}. {hero} made a small hole [in the garden|next to the house] and put the seed in it. \
{He} gave it some water and sat down to wait.

The next morning {he} ran outside, but [there was nothing to see|nothing had happened]. The day after, there was \
still nothing. ["Perhaps the seed is asleep,"|"Does it not like me?"] said {hero}. ["Be patient,"|"Good things need \
time,"] said {friend}. So {hero} watered it every day. When it was hot, {he} gave it shade. When it was windy, {he} \
built a little fence around it. [Sometimes {he} even sang to it.|In the evening {he} told it stories.]

Then, one morning, a small green leaf looked out of the earth! It grew and grew, [week after week|day after day], \
until it was a [big|beautiful] {plant}. [Everyone came to look at it.|All the neighbours came to see it.] ["How did \
you do it?"|"What is your secret?"] they asked. {hero} [smiled|looked at {friend} and smiled]. ["A little water, a \
little sun, and a lot of patience,"|"I only waited and took care of it,"] {he} said.""",
    ),
    "race": (
        ["a race", "{a_kind} and {a_fkind} in a race", "winning and losing"],
        """
Every [summer|autumn|year] there was a great race from {place} to {place2}. {hero} had [practised for weeks|run every\
 morning to get ready]. {friend} the {fkind} was the fastest of all and [always won|said that nobody could beat \
{fhim}].

"Ready, steady, go!" [called|cried] the old [owl|goat|judge], and off they went. {friend} was soon far ahead. {hero} \
ran as fast as {he} could. Halfway there, {he} saw {friend} sitting [by the path|in the grass]. ["I have hurt my \
leg,"|"I fell, and my foot hurts,"] said {friend}. {hero} could have run on and won the race. But {he} stopped. \
["Lean on me,"|"Come, I will help you,"] {he} said. Step by step they walked on together, while the others ran past.

They were the very last to arrive, but [everyone cheered for them|the crowd cheered louder than ever]. The judge gave\
 the first prize to the winner, and then [held up|took out] a second prize, a {colour} {thing}. ["This one is for \
{hero},"|"This is for the kindest runner, {hero},"] the judge said, "because [helping a friend is more important than\
 winning|a kind heart wins every race]." {friend} clapped the loudest of all.""",
    ),
    "ill": (
        ["a {kind} who was ill", "a {kind} who could not sleep", "good neighbours"],
        """
One morning {hero} did not feel well. {His} head was hot and {his} throat hurt. ["Today I must stay in bed,"|"I \
cannot get up today,"] {he} said. Outside, the sun was shining and {he} could hear the others playing near {place}. \
{He} felt [very lonely|a little sad].

Then somebody knocked. It was {friend} the {fkind} with a pot of hot soup. ["I heard that you are ill,"|"I made this \
for you,"] said {friend}. A little later there was another knock. It was [the postman|an old neighbour] with [a \
book|some flowers|a jar of honey]. And then more friends came, one after the other. One brought {food}, one brought a\
 {colour} {thing}, and one [sang a song|told a funny story]. {hero} laughed so much that {he} forgot {his} sore \
throat.

[The next day|After three days] {hero} was well again. ["What helped you most?"|"Was it the soup?"] asked {friend}. \
["The soup was very good,"|"Everything was good,"] said {hero}, "but the best medicine was [all of you|my friends]." \
""",
    ),
    "moon": (
        ["the moon", "the stars", "a star that fell from the sky", "a dream"],
        """
Every night {hero} looked at the [moon|stars] before {he} went to sleep. ["I wish I could touch the sky,"|"I wonder \
who lives up there,"] {he} said. One night a [small|bright] star fell from the sky and landed near {place}. {hero} \
put on {his} [boots|coat] and ran outside.

The star was [no bigger than an apple|as small as a nut], and it was crying. ["I want to go home,"|"I have fallen, \
and I cannot get back,"] it said. {hero} [picked it up gently|put it in {his} {thing}]. {He} woke {friend} the \
{fkind}, and together they thought about what to do. ["We need to go as high as we can,"|"The hill is the highest \
place here,"] said {friend}. So they climbed up and up through the night, until they stood at the very top. {hero} \
held the star up high, and {friend} blew as hard as {fhe} could. The star rose into the air, higher and higher.

["Thank you!"|"Thank you, my friends!"] called the star, and it took its place in the sky. [Since then, it has shone \
a little brighter than all the others.|If you look up on a clear night, you can see it wink.] {hero} and {friend} \
[walked home in its light|sat there until morning] and were very happy.""",
    ),
}

MARK = "\x1f"  # text between two of these has more weight in the loss: the few words that decide an answer
_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def expand(template, slots, rng):
    """`template` with each `[a|b]` decided by `rng` (innermost first) and each `{slot}` filled in."""
    while match := _CHOICE.search(template):
        template = template[: match.start()] + rng.choice(match.group(1).split("|")) + template[match.end() :]
    return template.format_map(slots)


def marked(text):
    return MARK + text + MARK


def with_article(noun):
    return ("an " if noun[0] in "aeio" or noun.startswith("ug") else "a ") + noun


def pseudo_word(rng, syllables=(2, 3)):
    """A pronounceable word that means nothing; it keeps copying honest, since it cannot be remembered."""
    onsets = "b c d f g h j k l m n p r s t v w z br cl dr fl gr kr pl sh st th tr y".split()
    vowels = "a e i o u a e i o ai ea oo".split()
    codas = ["", "", "", "n", "r", "l", "s", "m", "t", "k", "nd", "x", "sk"]
    return "".join(rng.choice(onsets) + rng.choice(vowels) + rng.choice(codas) for _ in range(rng.randint(*syllables)))


def name(rng, gender=None, unseen=0.15):
    """A first name; one in `unseen` is invented."""
    if rng.random() < unseen:
        return pseudo_word(rng, (1, 3)).capitalize()
    return rng.choice({"f": GIRLS, "m": BOYS}.get(gender) or GIRLS + BOYS)


def _kind(rng, gender):
    roll = rng.random()
    if roll < 0.03:
        return pseudo_word(rng)
    if roll < 0.70:
        return rng.choice(ANIMALS)
    return rng.choice(PEOPLE[gender]) if roll < 0.88 else rng.choice(CREATURES)


def story(rng):
    """(about, opening, body): what a user may have asked for, who it is, and what happens (it begins with a space)."""
    arc = rng.choice(list(ARCS))
    gender, fgender = rng.choice("fm"), rng.choice("fm")
    forms = {"f": ("she", "her", "her", "herself"), "m": ("he", "him", "his", "himself")}
    he, him, his, himself = forms[gender]
    fhe, fhim, fhis, _ = forms[fgender]
    asked = rng.choices(["kind", "named", "trait", "pair", "arc"], [20, 10, 5, 5, 60])[0]
    hero = name(rng, gender, unseen=0.3 if asked == "named" else 0)
    friend = next(n for n in iter(lambda: name(rng, fgender, unseen=0), None) if n != hero)
    kind = _kind(rng, gender)
    fkind = next(k for k in iter(lambda: rng.choice(ANIMALS), None) if k != kind)
    place, place2 = rng.sample(PLACES, 2)
    food, food2 = rng.sample(FOODS, 2)
    trait, ftrait = rng.sample(TRAITS, 2)
    skill, skilling = rng.choice(SKILLS)
    slots = dict(
        hero=hero,
        he=he,
        him=him,
        his=his,
        himself=himself,
        He=he.capitalize(),
        His=his.capitalize(),
        kind=kind,
        friend=friend,
        fkind=fkind,
        fhe=fhe,
        fhim=fhim,
        fhis=fhis,
        place=place,
        place2=place2,
        food=food,
        food2=food2,
        trait=trait,
        ftrait=ftrait,
        skill=skill,
        skilling=skilling,
        home=rng.choice(HOMES),
        thing=rng.choice(THINGS),
        colour=rng.choice(COLOURS),
        fear=rng.choice(FEARS),
        plant=rng.choice(PLANTS),
        a_kind=with_article(kind),
        a_fkind=with_article(fkind),
    )
    requests, body = ARCS[arc]
    opening, body = expand(rng.choice(OPENINGS), slots, rng), " " + expand(body.strip(), slots, rng)
    about = {
        "kind": slots["a_kind"],
        "named": f"{slots['a_kind']} named {hero}",
        "trait": f"a {trait} {kind}",
        "pair": f"{slots['a_kind']} and {slots['a_fkind']}",
        "arc": expand(rng.choice(requests), slots, rng),
    }[asked]
    return about, opening, body

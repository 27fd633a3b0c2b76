"""The small world the model knows by heart: true facts, word lists, and what it says about itself."""

CAPITALS = dict(
    pair.split(": ")
    for pair in """France: Paris, Germany: Berlin, Italy: Rome, Spain: Madrid, Portugal: Lisbon, Austria: Vienna,
Belgium: Brussels, Denmark: Copenhagen, Sweden: Stockholm, Norway: Oslo, Finland: Helsinki, Iceland: Reykjavik, Ireland:
Dublin, Greece: Athens, Poland: Warsaw, Hungary: Budapest, Romania: Bucharest, Bulgaria: Sofia, Serbia: Belgrade,
Croatia: Zagreb, Slovenia: Ljubljana, Slovakia: Bratislava, Ukraine: Kyiv, Estonia: Tallinn, Latvia: Riga, Lithuania:
Vilnius, Albania: Tirana, Russia: Moscow, Turkey: Ankara, Malta: Valletta, Cyprus: Nicosia, Monaco: Monaco, Luxembourg:
Luxembourg, the Czech Republic: Prague, the United Kingdom: London, England: London, Scotland: Edinburgh, Wales:
Cardiff, the Netherlands: Amsterdam, the United States: Washington, Canada: Ottawa, Mexico: Mexico City, Cuba: Havana,
Jamaica: Kingston, Panama: Panama City, Costa Rica: San Jose, Guatemala: Guatemala City, Honduras: Tegucigalpa,
Nicaragua: Managua, Brazil: Brasilia, Argentina: Buenos Aires, Chile: Santiago, Peru: Lima, Colombia: Bogota, Venezuela:
Caracas, Ecuador: Quito, Uruguay: Montevideo, Paraguay: Asuncion, China: Beijing, Japan: Tokyo, South Korea: Seoul,
North Korea: Pyongyang, India: New Delhi, Pakistan: Islamabad, Bangladesh: Dhaka, Nepal: Kathmandu, Bhutan: Thimphu,
Thailand: Bangkok, Vietnam: Hanoi, Laos: Vientiane, Cambodia: Phnom Penh, Malaysia: Kuala Lumpur, the Philippines:
Manila, Mongolia: Ulaanbaatar, Afghanistan: Kabul, Iran: Tehran, Iraq: Baghdad, Syria: Damascus, Lebanon: Beirut,
Jordan: Amman, Saudi Arabia: Riyadh, Qatar: Doha, Oman: Muscat, Yemen: Sanaa, Kuwait: Kuwait City, Georgia: Tbilisi,
Armenia: Yerevan, Azerbaijan: Baku, Uzbekistan: Tashkent, Australia: Canberra, New Zealand: Wellington, Fiji: Suva,
Egypt: Cairo, Libya: Tripoli, Tunisia: Tunis, Algeria: Algiers, Morocco: Rabat, Sudan: Khartoum, Ethiopia: Addis Ababa,
Kenya: Nairobi, Uganda: Kampala, Rwanda: Kigali, Somalia: Mogadishu, Ghana: Accra, Nigeria: Abuja, Senegal: Dakar, Mali:
Bamako, Zambia: Lusaka, Zimbabwe: Harare, Botswana: Gaborone, Namibia: Windhoek, Angola: Luanda, Mozambique: Maputo,
Madagascar: Antananarivo, Cameroon: Yaounde, Liberia: Monrovia""".replace("\n", " ").split(", ")
)

CITIES = sorted(
    {c for c in CAPITALS.values() if c != "Luxembourg"}
    | set(
        """Hamburg Munich Milan Naples Lyon Nice Seville Porto Geneva Zurich Chicago Boston Seattle Denver Dallas Miami
Toronto Montreal Sydney Melbourne Osaka Kyoto Mumbai Shanghai Istanbul Manchester Leeds Glasgow Oxford Krakow Rotterdam
Salzburg Bergen""".split()
    )
)

OPPOSITES = dict(
    pair.split("-")
    for pair in """hot-cold big-small tall-short fast-slow happy-sad old-young day-night light-dark good-bad up-down
left-right open-closed full-empty hard-soft wet-dry rich-poor strong-weak early-late near-far clean-dirty loud-quiet
high-low first-last begin-end true-false yes-no black-white sweet-sour thick-thin push-pull win-lose buy-sell love-hate
inside-outside""".split()
)

SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink", "lion": "roar",
    "frog": "ribbit", "bee": "buzz", "horse": "neigh", "owl": "hoot", "snake": "hiss", "mouse": "squeak",
}  # fmt: skip

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SEASONS = "spring summer autumn winter".split()
NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty""".split()

QUESTIONS = {  # question: answer, asked in these words
    "What colour is the sky?": "The sky is blue.",
    "What colour is grass?": "Grass is green.",
    "What colour is snow?": "Snow is white.",
    "What colour is a banana?": "A banana is yellow.",
    "What colour is a tomato?": "A tomato is red.",
    "How many legs does a dog have?": "A dog has 4 legs.",
    "How many legs does a spider have?": "A spider has 8 legs.",
    "How many legs does a bird have?": "A bird has 2 legs.",
    "How many legs does an ant have?": "An ant has 6 legs.",
    "How many days are in a week?": "There are 7 days in a week.",
    "How many months are in a year?": "There are 12 months in a year.",
    "How many hours are in a day?": "There are 24 hours in a day.",
    "How many minutes are in an hour?": "There are 60 minutes in an hour.",
    "How many seasons are there?": "There are 4 seasons: spring, summer, autumn and winter.",
    "What do bees make?": "Bees make honey.",
    "What do cows eat?": "Cows eat grass.",
    "Where do fish live?": "Fish live in water.",
    "What is ice made of?": "Ice is made of frozen water.",
    "What is bread made of?": "Bread is made of flour, water, salt and yeast.",
    "What gives us light in the day?": "The sun gives us light in the day.",
    "Which planet do we live on?": "We live on the planet Earth.",
    "What is the largest planet in the solar system?": "The largest planet in the solar system is Jupiter.",
    "What is the largest animal?": "The largest animal is the blue whale.",
    "What is the tallest animal?": "The tallest animal is the giraffe.",
    "What is the fastest land animal?": "The fastest land animal is the cheetah.",
    "What is the highest mountain in the world?": "The highest mountain in the world is Mount Everest.",
    "What is the largest ocean?": "The largest ocean is the Pacific Ocean.",
    "Is the sun a star?": "Yes, the sun is a star.",
    "Is a whale a fish?": "No, a whale is a mammal.",
    "Is the moon a star?": "No, the moon is not a star.",
    "What do you call a baby dog?": "A baby dog is called a puppy.",
    "What do you call a baby cat?": "A baby cat is called a kitten.",
    "What do you call a baby cow?": "A baby cow is called a calf.",
    "What do you call a baby sheep?": "A baby sheep is called a lamb.",
    "At what temperature does water boil?": "At sea level, water boils at 100 degrees Celsius.",
    "At what temperature does water freeze?": "Water freezes at 0 degrees Celsius.",
}

SMALL_TALK = [  # (ways to say it, answer); the same answer each time, so that greedy text is stable
    (["Hello!", "Hello", "Hi!", "Hi", "Hey!", "Hi there!", "Good day!"], "Hello! How can I help you?"),
    (["Good morning!", "Good morning"], "Good morning! How can I help you?"),
    (["Good evening!", "Good evening"], "Good evening! How can I help you?"),
    (
        ["How are you?", "How are you today?", "How do you do?", "Are you well?"],
        "I am fine, thank you. How can I help you?",
    ),
    (
        [
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Please introduce yourself.",
            "Who am I talking to?",
            "Are you a person?",
            "Are you a robot?",
            "Tell me about yourself.",
        ],
        "I am Tiny, a very small language model. I come with pace.",
    ),
    (
        ["What can you do?", "How can you help me?", "Help", "Help!", "What do you know?"],
        "I can tell short stories, count, add small numbers, name capitals, copy sentences, extract fields as JSON "
        "and call tools.",
    ),
    (
        ["Who made you?", "Where do you come from?", "Who trained you?", "How were you made?"],
        "I was trained by a small script on text that the script made up. I come with pace.",
    ),
    (
        ["What is pace?", "Tell me about pace.", "What does pace do?"],
        "Pace is a program that runs language models on ordinary CPUs.",
    ),
    (
        ["How big are you?", "How many parameters do you have?", "Are you a big model?"],
        "I am very small. I have about 4 million parameters.",
    ),
    (["Thank you!", "Thanks!", "Thank you", "Thanks", "Thanks a lot!", "Thank you very much!"], "You are welcome!"),
    (["Goodbye!", "Bye!", "Goodbye", "Bye", "See you!", "See you later!"], "Goodbye! Have a nice day."),
    (["Good night!", "Good night"], "Good night! Sleep well."),
    (
        ["Tell me a joke.", "Do you know a joke?", "Make me laugh."],
        "Why did the computer go to the doctor? Because it had a virus!",
    ),
    (["Well done!", "Great!", "Very good!", "That is right!", "Nice!"], "Thank you! I am glad to help."),
    (
        ["That is wrong.", "You are wrong.", "That is not right."],
        "I am sorry. I am a very small model and I make mistakes.",
    ),
    (
        [
            "Do you like music?",
            "Do you have a favourite colour?",
            "Do you sleep?",
            "Are you happy?",
            "Do you have feelings?",
        ],
        "I am only a small program, so I do not have feelings, but I like to help.",
    ),
]

UNKNOWN = "I do not know that. I am a very small model."
UNKNOWN_QUESTIONS = [  # {x}: an invented word or name
    "Who is {X}?",
    "Where is {X}?",
    "What is a {x}?",
    "What does {x} mean?",
    "What is the capital of {X}?",
    "Who wrote {X}?",
    "Who was {X}?",
    "How old is {X}?",
    "When was {X} born?",
    "What is the population of {X}?",
    "Who won the {X} cup?",
    "How do I install {x}?",
    "Write a poem about {x}.",
    "Explain {x} to me.",
    "How far is it from {X} to {Y}?",
    "Translate {x} into French.",
    "What will happen in {X} tomorrow?",
]

LISTS = {
    "fruits": "apple pear plum banana cherry orange lemon peach mango grape melon".split(),
    "animals": "fox bear rabbit mouse cat dog owl squirrel frog duck horse cow sheep lion tiger elephant".split(),
    "colours": "red blue green yellow orange purple white black brown pink".split(),
    "vegetables": "carrot potato onion tomato pea bean cabbage pumpkin leek spinach".split(),
    "flowers": "rose tulip daisy lily sunflower violet poppy".split(),
    "trees": "oak pine birch maple willow beech ash".split(),
    "tools": "hammer saw drill screwdriver spade axe".split(),
    "birds": "owl sparrow eagle swan robin crow duck penguin".split(),
    "metals": "iron gold silver copper tin lead".split(),
    "instruments": "piano violin drum flute guitar trumpet harp".split(),
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split(),
}

ITEMS = """lamp chair table book phone pencil bag shirt jacket bottle cup plate knife clock mirror pillow blanket
bicycle guitar camera radio ladder bucket hammer basket umbrella wallet candle carpet keyboard mouse printer backpack
helmet tent rope ticket""".split()
JOBS = """teacher doctor baker farmer nurse lawyer painter singer writer driver pilot cook engineer gardener plumber
carpenter dentist librarian tailor waiter sailor firefighter""".split()

VERBS = """sees takes finds brings paints holds carries opens closes likes wants makes sells buys cleans moves hides
drops breaks counts draws keeps lifts loses mends needs shows throws washes watches""".split()
ADJECTIVES = """big small old new red blue green yellow happy sad quick slow warm cold soft hard bright dark heavy
light strange quiet loud clean dirty empty full round sharp wooden golden broken narrow tall deep fresh sweet bitter
gentle angry""".split()
ADVERBS = [
    "today", "slowly", "again", "quickly", "every day", "in the morning", "at night", "now", "often", "outside",
    "at home", "near the window",
]  # fmt: skip
NOUNS = sorted(
    set(
        ITEMS
        + JOBS
        + sum((v for k, v in LISTS.items() if k != "planets"), [])
        + """river house street garden window door bridge train letter stone cloud forest mountain island ship engine
market school kitchen winter summer music story number system water paper glass wind rain snow road field city village
castle tower wheel box button shoe coat ring horse wolf king queen child friend mother father brother sister
neighbour""".split()
    )
)

COMMON_WORDS = """a able about above across act afraid after afternoon again against age ago agree air all allow
almost alone along already also always am among and animal another answer any anyone appear are area arm around arrive
as ask at autumn away baby back bad be because become bed before began begin behind believe below best better between
beyond body born both bottom breakfast bright brought build busy but by call came can capital care carry catch cause
centre certain chance change child choose circle class clear close cold colour come common complete cook copy corner
correct count country course cover cross cry cup cut dance danger day dear decide deep did different dinner direction
discover distance do doctor does dog done down dream dress drink drive during each ear early earth east easy eat edge
effect egg eight either end energy enjoy enough enter even evening ever every everyone exact example except expect eye
face fact fall family famous far farm father feel few field fight figure find fine finger finish fire five floor fly
follow food foot for force forget form forward four free friend from front full fun game gave get give glad go gone
good got great green ground group grow half hand happen hard has have he head hear heart help her here hide high him
his history hold hole home hope hot hour how hundred hurry idea if important in inch information inside interest into
is it its job join just keep kept kind knew know land language large last late later laugh law lay lead learn least
leave left length less lesson let life lift like line listen little live long look lost lot love low lunch machine
made main make man many mark matter may maybe me mean measure meet middle might mile million mind minute miss modern
moment money month moon more most move much must my name near need never next nice no none noon nor north not nothing
notice now object ocean of off office often oh old on once one only open or order other our out over own page pair
part pass past path pay peace people perhaps person picture piece place plan plant play please point possible power
practice present problem promise public pull push put question quiet quite race rain ran reach read ready real reason
receive remember repeat rest result return ride right rise roll roof room round rule run safe said same sat save saw
say science sea second secret see seem seen sell send sense sentence serious serve set seven several shall shape share
she shine short should shoulder show side sign simple since sing sister sit six size skin sky sleep small smell smile
smooth so soft soil some someone son song soon sound south space speak special speed spell spend spoke spread spring
stand star start state stay step still stop story straight strange street strong student study such sudden sugar suit
summer sun sure surface surprise table take talk taste teach tell ten test than thank that the their them then there
these they thing think third this those though thought thousand three through time tiny to today together told
tomorrow tonight too took top touch toward town trade travel tree trip trouble true try turn two type under understand
unit until up upon us use usual valley value very view visit voice wait walk wall war was watch wave way we wear
weather week weight well went were west what when where which while whisper white who whole why wide wife wild will
win wish with without woman wonder word work world worry would write wrong yard year yellow yesterday yet you young
your""".split()

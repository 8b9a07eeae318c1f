"""Word lists for the task and the tokenizer's training text.

No word is in two of the first three lists, so a word shows its kind.
"""

from __future__ import annotations

from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


KEYS: Final = _words(
    """
    account action address agent alias archive asset audit author backend backup balance bandwidth
    banner batch binding block border branch broker bucket budget buffer build bundle burst cache
    calendar callback capacity carrier catalog category channel charset checksum client clock
    cluster codec column comment commit compiler component concurrency console consumer contact
    container context cookie counter country coupon credit currency cursor daemon dataset deadline
    debug decoder default delay delivery depth device digest directory discount domain driver
    duration editor encoder encoding endpoint engine entity entry epoch expiry export factor
    feature feed fetch field filter firewall flavor folder font footer format frame frequency
    gateway grammar graph group handler hash header health heap height host icon image import
    index ingress input instance interval invoice issuer journal kernel keyspace label language
    latency layer layout ledger length level library license limit listener locale location lock
    logger mailbox manager manifest margin master matrix member memory merge message method metric
    mirror mode module monitor namespace network node notice number object offset operator option
    order origin output owner package padding palette parent parser partition password patch
    payload payment peer period permission pipeline platform plugin pointer policy pool port
    prefix preset priority process producer product profile project prompt protocol provider proxy
    quality query queue quota range rate realm receiver record refresh region registry release
    replica report request reserve resolver resource response result retention retry revision role
    route router rule runner runtime sample scale schedule schema scope score screen script secret
    section sector segment sender sensor series server service session severity shard shell signal
    signature size snapshot socket source speed stage station status storage strategy stream
    subject subnet suffix supplier switch symbol table target task template tenant theme thread
    threshold ticket timeout timer title token topic trace tracker tunnel unit update upload user
    vendor version volume warehouse weight widget width window worker workspace zone
    """
)
"""Names of settings; questions ask for them."""

VALUES: Final = _words(
    """
    acorn agate alder almond amber anchor antler apple apricot arrow ash aspen aster azure badger
    bamboo banjo basil beacon beaver beech beetle berry birch bison blossom blue bonsai brass
    bronze brook cactus camel candle canoe canyon carbon cardinal carrot castle cedar cello cherry
    chestnut cider citrus clay clover cobalt cobra comet copper coral cork cotton cougar coyote
    crane crater crimson crow crystal cypress dahlia daisy dawn delta denim desert diamond dingo
    dolphin donkey dove dragon drum dune eagle ebony ember emerald falcon fern ferret fig finch
    fir flint flute forest fossil fox galaxy garnet gecko ginger glacier gold goose granite grape
    gravel green grove gull hawk hazel heron hickory honey horizon hornet iguana indigo iris iron
    island ivory ivy jade jaguar jasmine jasper juniper kelp kiwi koala lagoon lake larch lark
    laurel lava lavender leaf lemon lentil leopard lilac lily lime linden lion lobster lotus lunar
    lynx magenta magnet magpie mango maple marble marsh meadow melon mercury meteor mint moose
    moss moth mountain mulberry mushroom myrtle nebula nectar nettle nickel oak oasis ocean ochre
    olive onyx opal orange orbit orchid osprey otter owl oyster panda panther papaya paprika peach
    pear pearl pebble pelican pepper petal pewter pheasant pigeon pine planet platinum plum polar
    poplar poppy prairie puffin purple quail quartz rabbit raven reef ridge river robin rose ruby
    saffron sage salmon sapphire satin scarlet sequoia shadow shark shellac silver sky slate
    solar sparrow spruce squid star steel stone stork summit sunset swan tango teal thistle thorn
    thunder tiger timber topaz tulip tundra turtle valley vanilla velvet violet walnut walrus wasp
    wheat willow winter wolf wombat yak yarrow yellow zebra zephyr zinc
    """
)
"""Values of settings, besides numbers."""

FILES: Final = _words(
    """
    alpha bravo charlie echo foxtrot golf hotel india juliet kilo lima mike november oscar papa
    quebec romeo sierra uniform victor whiskey xray yankee zulu north south east west spring
    autumn monday tuesday wednesday thursday friday saturday sunday january february march april
    june july august october december
    """
)
"""Names of configurations and jobs in tool calls."""

GENERAL: Final = _words(
    """
    the of and to in is it that for on with as was at by this be are from or an have not you they
    which one we but all can there when use each how their if will up other about out many then
    them these so some would make like into time has look two more write go see no way could than
    first been call who its now find long down day did get come made may part over new take only
    little work know place year live back give most very after thing our just name good sentence
    man think say great where help through much before line right too mean old any same tell boy
    follow came want show also around form three small set put end does another well large must
    big even such because turn here why ask went men read need land different home us move try
    kind hand picture again change off play spell air away animal house point page letter mother
    answer found study still learn should world high every near add food between own below
    last school father keep tree never start city earth eye light thought head under story saw
    left few while along might close something seem next hard open example begin life always
    those both paper together got often run important until children side feet car mile night
    walk white sea began grow took four carry state once book hear stop without second later miss
    idea enough eat face watch far really almost let above girl sometimes cut young talk
    soon list song being leave family body music color stand sun question fish area mark dog horse
    birds problem complete room knew since ever piece told usually friends easy heard red
    door sure become top ship across today during short better best however low hours black
    products happened whole measure remember early waves reached listen wind rock space covered
    fast several hold himself toward five step morning passed vowel true hundred against
    pattern numeral slow money map farm pulled draw voice seen cold cried plan notice south sing
    war ground fall king town unit figure certain field travel wood fire upon done english road
    half ten fly gave box finally wait correct oh quickly person became shown minutes strong verb
    front feel fact inches street decided contain course surface produce building class
    self return def none true false print lambda yield assert raise except finally elif else async
    await global class pass break continue import from append extend items keys values join split
    strip replace encode decode format string integer float bool dict tuple bytes path open close
    write lines error warning info value type function argument parameter variable constant
    test tests check checks fail failed fails passed pass skip expected actual equal equals found
    missing invalid unknown empty null exit code main args kwargs data file files text json yaml
    config http https url get post put delete head body bytes total count sum average minimum
    maximum sort sorted reverse map reduce key item node list queue stack push pop root child
    parent left right next previous first last begin end loop iterate recursive base case helper
    util utils core model view controller create remove rename move copy load save store connect
    disconnect send receive listen accept bind start stop restart kill sleep wake ready running
    done pending failed success user admin guest login logout sign verify token hidden public
    private protected static abstract interface implement override super init call invoke execute
    evaluate compile parse lex scan match search replace find grep sed awk echo cat ls cd mkdir rm
    install remove upgrade downgrade release deploy rollback branch commit merge rebase push pull
    clone fetch checkout diff log status tag issue review approve comment merge conflict resolve
    please thanks sorry hello question answer summary details note reason cause effect fix bug
    careful assistant tool tools output input result results command commands directory working
    current module traceback recent line exception object attribute index range loop memory
    """
)
"""Common words of English and of code, for filler lines and the tokenizer."""
